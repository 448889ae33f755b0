"""The plan of a step keeps its invariants for every mix of lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimerl.training.packing import plan_step

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)
ranks = st.integers(1, 8)
budgets = st.integers(1, 500)


@st.composite
def steps(draw):
    step = draw(lengths)
    return step, draw(ranks), draw(budgets), draw(st.integers(1, len(step)))


@given(steps())
def test_every_sample_is_computed_exactly_once(step):
    sizes, size, budget, minibatches = step
    plan = plan_step(sizes, size, budget, minibatches)
    assert sorted(sample for part in plan.minibatches for sample in part.samples) == list(range(len(sizes)))
    assert len(plan.minibatches) == minibatches


@given(steps())
def test_all_ranks_have_the_same_number_of_micro_batches(step):
    plan = plan_step(*step)
    for part in plan.minibatches:
        assert len({len(rank) for rank in part.ranks}) == 1
        assert len(part.ranks) == step[1]


@given(steps())
def test_no_micro_batch_exceeds_the_budget_unless_it_is_one_sample(step):
    sizes, _, budget, _ = step
    for part in plan_step(*step).minibatches:
        for micro_batch in (each for rank in part.ranks for each in rank):
            assert len(micro_batch) <= 1 or sum(sizes[i] for i in micro_batch) <= budget


@given(steps())
def test_ranks_differ_by_at_most_the_longest_sample(step):
    sizes = step[0]
    for part in plan_step(*step).minibatches:
        loads = [sum(sizes[i] for each in rank for i in each) for rank in part.ranks]
        assert max(loads) - min(loads) <= max(sizes[i] for i in part.samples)


@given(steps())
def test_micro_batches_are_empty_only_where_samples_are_fewer(step):
    for part in plan_step(*step).minibatches:
        micro_batches = [each for rank in part.ranks for each in rank]
        assert all(micro_batches) or len(part.samples) < len(micro_batches)


@given(steps())
def test_minibatches_are_consecutive_and_of_equal_size(step):
    parts = [sorted(part.samples) for part in plan_step(*step).minibatches]
    assert [sample for part in parts for sample in part] == list(range(len(step[0])))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_minibatches_than_samples_are_refused():
    with pytest.raises(ValueError, match=r"2 samples cannot be cut into .* = 3"):
        plan_step([4, 4], 1, 100, 3)


def test_short_samples_fill_few_micro_batches():
    plan = plan_step([15] * 300, ranks=2, micro_batch_tokens=4096, minibatches=1)
    assert [len(rank) for rank in plan.minibatches[0].ranks] == [1, 1]
