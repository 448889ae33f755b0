"""The plan of a step keeps its invariants for every mix of lengths and groups."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimerl.training.packing import PackingRules, SampleShape, plan_step

groups = st.lists(
    st.tuples(st.integers(1, 80), st.lists(st.integers(0, 220), min_size=1, max_size=8)), min_size=1, max_size=12
)


@st.composite
def steps(draw):
    shapes = [
        SampleShape(prompt, response, group)
        for group, (prompt, responses) in enumerate(draw(groups))
        for response in responses
    ]
    rules = PackingRules(
        ranks=draw(st.integers(1, 8)),
        micro_batch_tokens=draw(st.integers(1, 500)),
        shared_prefix=draw(st.booleans()),
        pair_cost=draw(st.sampled_from([0.0, 1e-3, 0.1])),
        multiple=draw(st.integers(1, 3)),
    )
    return shapes, rules, draw(st.integers(1, len(shapes)))


def tokens_of(shapes, rules, samples) -> int:
    """From the definition: each response, and each prompt as often as it is computed."""
    prompts = {shapes[i].group: shapes[i].prompt for i in samples}
    shared = sum(prompts.values()) if rules.shared_prefix else sum(shapes[i].prompt for i in samples)
    return shared + sum(shapes[i].response for i in samples)


def micro_batches(plan):
    return [each for part in plan.minibatches for rank in part.ranks for each in rank]


@given(steps())
def test_every_sample_is_computed_exactly_once(step):
    shapes, _, minibatches = step
    plan = plan_step(*step)
    assert sorted(sample for part in plan.minibatches for sample in part.samples) == list(range(len(shapes)))
    assert len(plan.minibatches) == minibatches


@given(steps())
def test_all_ranks_have_the_same_number_of_micro_batches_in_whole_rounds(step):
    _, rules, _ = step
    for part in plan_step(*step).minibatches:
        [count] = {len(rank) for rank in part.ranks}
        assert len(part.ranks) == rules.ranks
        assert count % rules.multiple == 0


@given(steps())
def test_no_micro_batch_exceeds_the_budget_unless_it_is_one_sample(step):
    shapes, rules, _ = step
    for each in micro_batches(plan_step(*step)):
        assert len(each) <= 1 or tokens_of(shapes, rules, each) <= rules.micro_batch_tokens


@given(steps())
def test_two_ranks_differ_by_at_most_the_largest_unit(step):
    shapes, rules, _ = step
    if rules.pair_cost:
        return
    for part in plan_step(*step).minibatches:
        loads = [sum(tokens_of(shapes, rules, each) for each in rank) for rank in part.ranks]
        by_group = groupby(sorted(part.samples), key=lambda i: shapes[i].group if rules.shared_prefix else i)
        largest = max(tokens_of(shapes, rules, list(members)) for _, members in by_group)
        assert max(loads) - min(loads) <= largest


@given(steps())
def test_minibatches_are_consecutive_and_of_equal_size(step):
    shapes, _, _ = step
    parts = [sorted(part.samples) for part in plan_step(*step).minibatches]
    assert [sample for part in parts for sample in part] == list(range(len(shapes)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_minibatches_than_samples_are_refused():
    with pytest.raises(ValueError, match=r"2 samples cannot be cut into .* = 3"):
        plan_step([SampleShape(2, 2, 0), SampleShape(2, 2, 0)], PackingRules(1, 100), 3)


def test_short_samples_fill_few_micro_batches():
    plan = plan_step([SampleShape(5, 10, i) for i in range(300)], PackingRules(2, 4096), minibatches=1)
    assert [len(rank) for rank in plan.minibatches[0].ranks] == [1, 1]


def test_a_group_stays_together_where_ranks_are_balanced_without_cutting_it():
    shapes = [SampleShape(50, 10, group) for group in range(8) for _ in range(8)]
    plan = plan_step(shapes, PackingRules(2, 10_000, shared_prefix=True), minibatches=1)
    for rank in plan.minibatches[0].ranks:
        assert sorted({shapes[i].group for each in rank for i in each}) == sorted(
            {shapes[i].group for i in range(64) if i in {j for each in rank for j in each}}
        )
    assert max(tokens_of(shapes, PackingRules(2, 1, True), rank[0]) for rank in plan.minibatches[0].ranks) == 4 * 130


def test_a_single_group_is_cut_for_two_ranks():
    shapes = [SampleShape(50, 100, 0) for _ in range(8)]
    plan = plan_step(shapes, PackingRules(2, 10_000, shared_prefix=True), minibatches=1)
    assert [sum(map(len, rank)) for rank in plan.minibatches[0].ranks] == [4, 4]


def test_long_sequences_weigh_more_where_attention_costs():
    shapes = [SampleShape(10, 1000, 0), *(SampleShape(10, 90, i) for i in range(1, 11))]
    cheap = plan_step(shapes, PackingRules(2, 10_000), 1).minibatches[0].ranks
    dear = plan_step(shapes, PackingRules(2, 10_000, pair_cost=0.01), 1).minibatches[0].ranks
    assert sorted(sum(map(len, rank)) for rank in cheap) == [1, 10]
    assert sorted(sum(map(len, rank)) for rank in dear) == [1, 10]
    two_long = [SampleShape(10, 1000, 0), SampleShape(10, 500, 1), *(SampleShape(10, 90, i) for i in range(2, 7))]
    busiest = [
        next(sorted(rank[0]) for rank in plan_step(two_long, rules, 1).minibatches[0].ranks if 0 in rank[0])
        for rules in (PackingRules(2, 10_000), PackingRules(2, 10_000, pair_cost=0.01))
    ]
    assert busiest[0] == [0]
    assert busiest[1] == [0]


@given(st.lists(st.integers(1, 80), min_size=2, max_size=12), st.integers(100, 300))
def test_samples_of_a_group_with_prompts_of_their_own_share_none(prompts, budget):
    """Sub-agents of one group: each prompt counts, though the group is one."""
    shapes = [SampleShape(prompts[i // 2], 10, "g", 10, prefix=i // 2) for i in range(len(prompts))]
    plan = plan_step(shapes, PackingRules(ranks=1, micro_batch_tokens=budget, shared_prefix=True), 1)
    assert plan.minibatches[0].totals.groups == 1
    for samples in micro_batches(plan):
        computed = {shapes[i].prefix: shapes[i].prompt for i in samples}
        assert sum(computed.values()) + sum(shapes[i].response for i in samples) <= budget
