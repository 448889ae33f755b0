"""The rollout role's part of a checkpoint: another process goes on with the same prompts, samples and books."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from fake_engine import LONG, go_on
from scene import Scene, rollout

from slimerl.rewards.outcome import Failed, Scored
from slimerl.samples.messages import RolloutState, decode, encode, unpack_array
from slimerl.samples.sample import SampleState
from slimerl.samples.store import StoreError

GENERATED, REWARDED = SampleState.GENERATED, SampleState.REWARDED
Act = Callable[[Scene], Coroutine[Any, Any, Any]]


def process(act: Act, **options: Any) -> Any:
    """What `act` returns, in a rollout of its own."""

    async def run() -> Any:
        async with asyncio.timeout(30), rollout(**options) as made:
            return await act(made)

    return asyncio.run(run())


async def train(made: Scene, first: int, last: int) -> dict[str, bytes]:
    """Steps `first` to `last` with a sync before each; sample id → tokens of all that was trained."""
    tokens = {}
    for step in range(first, last + 1):
        await made.serve(step - 1)
        manifest = await made.batch(step)
        for payload in made.store.payloads([one.sample_id for one in manifest.samples]):
            tokens[payload.sample_id] = payload.tokens
        made.scheduler.trained(manifest.batch_id)
    return tokens


def drop_some(request: Any) -> Any:
    return Failed("timeout", "") if int(request.answer) % 3 == 0 else Scored(1.0, True)


async def never_judged(_: Any) -> Any:
    await asyncio.Event().wait()


def seeds_of(made: Scene) -> dict[str, int]:
    """Sample id → the seed that engines were sent."""
    requests = [request for engine in made.engines for request in engine.requests]
    return {request["rid"].partition("#")[0]: request["sampling_params"]["sampling_seed"] for request in requests}


def saved(made: Scene) -> RolloutState:
    """Through the wire, as a checkpoint holds it."""
    return decode(encode(made.scheduler.state()), RolloutState)


def test_c1_a_synchronous_run_draws_the_same_prompts_and_samples_after_a_restart():
    """Injected: the process ends after step 2; drops before and after must not move the prompts."""

    async def whole(made: Scene) -> Any:
        made.reward.verdict = drop_some
        return await train(made, 1, 5), made.store.counts()

    async def before(made: Scene) -> Any:
        made.reward.verdict = drop_some
        return await train(made, 1, 2), saved(made)

    async def after(made: Scene) -> Any:
        made.reward.verdict = drop_some
        made.scheduler.restore(state)
        return await train(made, 3, 5), made.store.counts()

    expected, counts = process(whole)
    first, state = process(before)
    assert state.groups == [], "nothing is under way between two steps"
    assert sum(state.dropped.values()) > 0
    second, counts_after = process(after)
    assert first | second == expected
    assert first.keys().isdisjoint(second)
    assert counts_after == counts


def test_c1_an_asynchronous_run_keeps_what_was_finished_and_makes_the_rest_again():
    """Injected: the process ends while a group is finished, but not trained, and others are under way."""

    async def before(made: Scene) -> Any:
        await train(made, 1, 1)
        await made.until(lambda: sum(group.ready for group in made.store.unleased()) >= 3)
        return saved(made), made.store.counts()

    async def after(made: Scene) -> Any:
        made.scheduler.restore(state)
        made.store.check()
        counts, gate = made.store.counts(), made.scheduler.gate
        admitted = gate.accepted, gate.running
        return counts, admitted, await train(made, 2, 3)

    state, counts_before = process(before, staleness=2)
    ready = {sample.payload.sample_id: sample.payload.tokens for group in state.groups for sample in group.samples}
    assert len(ready) >= 9
    whole = [group for group in state.groups if not group.missing]
    counts, (accepted, running), trained = process(after, staleness=2)
    assert counts.trained == counts_before.trained
    assert counts.buffered == sum(len(group.samples) for group in whole)
    assert accepted == 2 + len(whole)
    assert accepted + running == 2 + len(state.groups)
    kept = ready.keys() & trained.keys()
    assert kept
    assert {name: trained[name] for name in kept} == {name: ready[name] for name in kept}


def test_c1_a_group_of_which_too_few_samples_are_left_ends_where_the_process_before_was_about_to_end_it():
    """Injected: the process ends between the drop of a group's last sample but one and that of the last."""

    async def before(made: Scene) -> Any:
        await train(made, 1, 1)
        await made.until(lambda: sum(group.ready for group in made.store.unleased()) >= 1)
        return saved(made)

    async def after(made: Scene) -> Any:
        made.scheduler.restore(state)
        gate = made.scheduler.gate
        return made.store.counts(), gate.accepted + gate.running, await train(made, 2, 2)

    state = process(before, staleness=2)
    at, group = next((at, each) for at, each in enumerate(state.groups) if not each.missing)
    lost = group.sample_ids[1:]
    state.groups[at] = msgspec.structs.replace(group, sample_ids=group.sample_ids[:1], samples=group.samples[:1])
    state = msgspec.structs.replace(state, dropped={"timeout": len(lost)})
    counts, admitted, trained = process(after, staleness=2)
    assert counts.dropped == {"timeout": len(lost), "group_too_small": 1}
    assert admitted == 2 + len(state.groups) - 1
    assert trained
    assert trained.keys().isdisjoint(group.sample_ids)


def is_number(sample_id: str, number: int) -> bool:
    return sample_id.endswith(f"/{number}")


async def judged_but_for_one(request: Any) -> Any:
    """Of each group sample 1 is lost, sample 2 never judged."""
    if is_number(request.sample_id, 2):
        await never_judged(request)
    return Failed("timeout", "") if is_number(request.sample_id, 1) else Scored(0.25, False)


def test_c1_the_finished_samples_of_an_open_group_are_kept_and_what_was_generated_is_judged_alone():
    """Injected: the process ends while two groups each have two rewarded samples, a lost one and one to be judged."""

    async def before(made: Scene) -> Any:
        await train(made, 1, 1)
        await made.until(lambda: sum(group.ready for group in made.store.unleased()) == 2)
        made.reward.score = judged_but_for_one
        await made.serve(1)
        store = made.store
        await made.until(
            lambda: (store.in_state(REWARDED), store.in_state(GENERATED), len(store._dropped)) == (4, 2, 1)
        )
        unfinished = [store.sample(one).payload() for group in store.open_groups() for one in (f"{group}/2",)]
        return saved(made), store.counts(), seeds_of(made), unfinished

    async def after(made: Scene) -> Any:
        made.scheduler.restore(state)
        counts, views = made.store.counts(), made.store.unleased()
        await made.serve(1)
        await made.until(lambda: all(group.ready for group in made.store.unleased()))
        seeds = seeds_of(made)
        payloads, metas = {}, {}
        for step in (2, 3):
            manifest = await made.batch(step)
            metas |= {one.sample_id: one for one in manifest.samples}
            payloads |= {one.sample_id: one for one in made.store.payloads(metas.keys() - payloads.keys())}
            made.scheduler.trained(manifest.batch_id)
        made.store.check()
        return counts, views, seeds, payloads, metas

    state, counts_before, seeds_before, unfinished = process(before, staleness=1, size=4)
    open_groups = [group for group in state.groups if group.missing]
    assert [group.version for group in open_groups] == [1, 1]
    missing = {one for group in open_groups for one in group.missing}
    assert missing == {payload.sample_id for payload in unfinished}

    counts, views, seeds, payloads, metas = process(after, staleness=1, size=4)
    assert counts == counts_before
    assert [(view.group_id, view.version) for view in views] == [(each.group_id, each.version) for each in state.groups]
    assert missing <= seeds_before.keys()
    assert not seeds, "nothing is generated twice"
    kept = {each.payload.sample_id: each for group in state.groups for each in group.samples}
    assert {one: payloads[one] for one in kept} == {one: each.payload for one, each in kept.items()}
    assert {one: metas[one].reward for one in kept} == {one: each.reward for one, each in kept.items()}
    assert {one.sample_id: one for one in unfinished} == {one: payloads[one] for one in missing}
    assert [one for one in metas if one.startswith(f"{open_groups[0].group_id}/")] == open_groups[0].sample_ids
    assert payloads.keys() == kept.keys() | missing, "what was dropped is not made again"


def test_c1_tokens_of_unfinished_samples_survive_a_restart_and_are_gone_on_from():
    """Injected: the process ends while each sample has two chunks of four tokens and waits for its third."""

    async def whole(made: Scene) -> Any:
        made.engines[0].answer = go_on
        return await train(made, 1, 1)

    async def before(made: Scene) -> Any:
        made.engines[0].answer = go_on
        made.engines[0].stopped_at = 2 + 8
        await made.serve(0)
        await made.until(lambda: [len(r["input_ids"]) for r in made.engines[0].waiting] == [10] * 6)
        return saved(made)

    async def after(made: Scene) -> Any:
        made.engines[0].answer = go_on
        made.scheduler.restore(state)
        tokens = await train(made, 1, 1)
        return tokens, [len(request["input_ids"]) for request in made.engines[0].requests]

    options = {"engines": 1, "chunk_tokens": 4, "max_new_tokens": LONG}
    expected = process(whole, **options)
    state = process(before, **options)
    begun = [each.payload for group in state.groups for each in group.begun]
    assert [len(unpack_array(payload.tokens, "int32")) for payload in begun] == [10] * 6
    tokens, asked = process(after, **options)
    assert tokens == expected
    assert asked == [10] * 6, "only the last chunk is generated"


def test_a_group_that_is_made_again_keeps_the_version_that_its_staleness_counts_from():
    async def before(made: Scene) -> Any:
        await train(made, 1, 1)
        made.reward.score = never_judged
        await made.serve(1)
        await made.until(lambda: len(made.store.unleased()) == 4)
        return saved(made)

    async def after(made: Scene) -> Any:
        made.scheduler.restore(state)
        return made.store.unleased()

    state = process(before, staleness=1)
    assert {group.version for group in state.groups if group.missing} >= {1}
    again = process(after, staleness=1)
    assert [(group.group_id, group.version) for group in again] == [
        (group.group_id, group.version) for group in state.groups
    ]


def test_the_state_is_refused_while_a_batch_is_leased_and_a_restore_after_the_first_sample():
    async def act(made: Scene) -> None:
        await made.serve(0)
        manifest = await made.batch(1)
        with pytest.raises(StoreError, match="step-1 is leased"):
            made.scheduler.state()
        made.scheduler.trained(manifest.batch_id)
        with pytest.raises(StoreError, match="admitted already"):
            made.scheduler.restore(made.scheduler.state())

    process(act)
