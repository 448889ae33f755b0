"""Over-sampling with early stop: the first complete groups are the batch, the others stay as partial samples."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_engine import LONG, go_on
from scene import Scene, rollout

from slimerl.rollout.admission import GateError, StalenessGate
from slimerl.samples.messages import (
    BatchManifest,
    HoldRequest,
    ReleaseRequest,
    RolloutState,
    decode,
    encode,
    unpack_array,
)

Act = Callable[[Scene], Coroutine[Any, Any, Any]]
OPTIONS = {"engines": 1, "groups": 2, "size": 2, "staleness": 1, "chunk_tokens": 4, "max_new_tokens": LONG}
"""Two groups a step."""


def process(act: Act, **options: Any) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(30), rollout(**{**OPTIONS, "oversample": 1.5, **options}) as made:
            made.engines[0].answer = go_on
            return await act(made)

    return asyncio.run(run())


async def sync(made: Scene, version: int) -> None:
    """New weights, while requests wait in their engine."""
    reply = await made.weights.hold(HoldRequest(version, 20.0))
    made.engines[0].version = str(version)
    made.weights.release(ReleaseRequest(reply.lease_id, version, ["engine-0"]))


async def step(made: Scene, number: int) -> BatchManifest:
    manifest = await made.batch(number)
    made.store.check()
    return manifest


def straggle(made: Scene) -> str:
    """The samples of the first group wait before the last of their three chunks. Returns the group."""
    first = made.scheduler.prompts.at(0)
    made.engines[0].stops = lambda tokens: tokens[1] == first.prompt.tokens[1] and len(tokens) == 2 + 8
    return first.group_id


def of(made: Scene, manifest: BatchManifest) -> dict[str, tuple[list[int], list[int]]]:
    """Sample → tokens of its response, and their versions."""
    payloads = made.store.payloads([one.sample_id for one in manifest.samples])
    return {
        one.sample_id: (
            unpack_array(one.tokens, "int32").tolist()[one.prompt_length :],
            unpack_array(one.versions, "int32").tolist(),
        )
        for one in payloads
    }


def test_the_first_complete_groups_are_the_batch_and_the_rest_goes_on_under_the_next_weights():
    """Injected: the first group straggles."""

    async def act(made: Scene) -> None:
        slow = straggle(made)
        await sync(made, 0)
        first = await step(made, 1)
        assert slow not in {one.group_id for one in first.samples}
        assert made.store.counts().admitted == 3 * 2, "one and a half batches, and no more"
        assert first.metrics["rollout/partial_samples"] == 2
        assert first.metrics["rollout/partial_tokens"] == 2 * 8
        made.scheduler.trained(first.batch_id)
        await sync(made, 1)
        made.engines[0].let_go()
        second = await step(made, 2)
        assert made.store.counts().admitted == 5 * 2
        samples = of(made, second)
        late = {name: each for name, each in samples.items() if name.startswith(f"{slow}/")}
        assert len(late) == 2, "what may be one version behind is trained now or never"
        for tokens, versions in late.values():
            assert len(tokens) == LONG
            assert versions == [0] * 10 + [1] * 2, "eight before, and half of the chunk under way at the update"
        assert second.metrics["rollout/staleness_max"] == 1
        assert made.store.counts().dropped == {}
        names = [request["rid"] for request in made.engines[0].requests]
        assert len(names) == len(set(names)), "nothing is generated twice"

    process(act)


def test_a2_partial_samples_survive_a_restart_with_their_tokens_and_versions():
    """Injected: the process ends after the update, with a group left over from before it."""

    async def before(made: Scene) -> tuple[str, RolloutState]:
        slow = straggle(made)
        await sync(made, 0)
        first = await step(made, 1)
        made.scheduler.trained(first.batch_id)
        await sync(made, 1)
        await made.until(lambda: len(made.engines[0].waiting) == 2 and made.store.counts().buffered == 2 * 2)
        return slow, decode(encode(made.scheduler.state()), RolloutState)

    async def after(made: Scene) -> tuple[dict[str, tuple[list[int], list[int]]], list[int]]:
        made.scheduler.restore(state)
        await sync(made, 1)
        second = await step(made, 2)
        asked = [len(one["input_ids"]) for one in made.engines[0].requests if one["rid"].startswith(f"{slow}/")]
        return of(made, second), asked

    async def undisturbed(made: Scene) -> dict[str, tuple[list[int], list[int]]]:
        await sync(made, 0)
        return of(made, await step(made, 1))

    slow, state = process(before)
    begun = {one.payload.sample_id: one for group in state.groups for one in group.begun}
    assert {name.rpartition("/")[0] for name in begun} == {slow}
    samples, asked = process(after)
    assert asked == [10, 10], "only what is missing is generated"
    whole = process(undisturbed, oversample=1)
    for name in begun:
        tokens, versions = samples[name]
        assert tokens == whole[name][0], "as if nothing had come between"
        assert versions == [0] * 8 + [1] * 4


def test_over_sampled_groups_of_an_earlier_process_are_taken_over_by_one_that_does_not():
    async def before(made: Scene) -> RolloutState:
        straggle(made)
        await sync(made, 0)
        first = await step(made, 1)
        made.scheduler.trained(first.batch_id)
        await sync(made, 1)
        await made.until(lambda: len(made.store.unleased()) == 4)
        return decode(encode(made.scheduler.state()), RolloutState)

    async def after(made: Scene) -> int:
        made.scheduler.restore(state)
        for number in (2, 3):
            await sync(made, number - 1)
            made.scheduler.trained((await step(made, number)).batch_id)
        return made.store.counts().trained

    state = process(before, oversample=2)
    assert process(after, oversample=1) == 12


def test_a1_a_run_that_goes_on_with_less_staleness_refuses_what_is_older_than_that():
    """Injected: max_staleness is set from 1 to 0 for a run that goes on; as few groups as there are would be trained
    a version late, in a run that is to be synchronous."""

    async def before(made: Scene) -> RolloutState:
        await sync(made, 0)
        made.scheduler.trained((await step(made, 1)).batch_id)
        return decode(encode(made.scheduler.state()), RolloutState)

    async def after(made: Scene) -> None:
        made.scheduler.restore(state)

    state = process(before, oversample=1.5)
    assert {group.version for group in state.groups} == {0}
    assert len(state.groups) <= 4, "no more than one step may have"
    with pytest.raises(GateError, match=r"begun at version 0 .* at version 1: .* set it to 1 or more, as it was"):
        process(after, staleness=0)


@pytest.mark.parametrize(
    ("staleness", "factor", "admitted"), [(1, 1, 4), (1, 1.25, 5), (1, 1.3, 6), (2, 3, 12), (0, 1, 4)]
)
def test_a1_so_many_groups_are_under_way_and_never_more_than_staleness_allows(staleness, factor, admitted):
    gate = StalenessGate(4, staleness, 100, version=0, oversample=factor)
    for _ in range(admitted):
        gate.admit()
    assert not gate.may_admit()
    with pytest.raises(GateError, match=f"reach the limit of {admitted}"):
        gate.admit()
    for _ in range(4):
        gate.accept()
    assert not gate.may_admit(), "finished groups that are not trained count as well"
    gate.advance(1)
    gate.admit()
