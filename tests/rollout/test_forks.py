"""Sub-agents: samples that a loop forks are of its group, end with it, and are never lost or doubled."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from scene import Scene, rollout

from slimerl.rewards.outcome import Outcome, Scored
from slimerl.rollout.agents.forks import without_forks
from slimerl.rollout.agents.loop import AgentFailed
from slimerl.rollout.agents.policy import Policy, PolicyError
from slimerl.rollout.agents.turns import turns_of
from slimerl.rollout.prompts import Prompt
from slimerl.samples.messages import BatchManifest, EvaluateRequest, RolloutState, decode, encode, unpack_array
from slimerl.samples.sample import Sample

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))
from talker import Talker, new_sample, policy_of

STOP, MARK, LONG_SAID = 2, 77, 9


def say(tokens: list[int], seed: int) -> list[int]:
    """The rest of a turn of nine tokens, a function of what stands before it: a prompt of two tokens, or a mark."""
    said = tokens[::-1].index(MARK) if MARK in tokens else len(tokens) - 2
    before = sum(tokens[: len(tokens) - said])
    return [*[10 + (7 * before + seed + place) % 60 for place in range(LONG_SAID - 1)][said:], STOP]


class Delegates:
    """Says something, has two sub-agents work on it, sees the end of what these said, and says something else.
    `fails`: which of the samples come to nothing, after their sub-agents are done."""

    def __init__(self, fails: Callable[[], bool] = lambda: False) -> None:
        self.fails = fails
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, policy: Policy, sample: Sample, prompt: Prompt) -> Outcome | None:
        await policy.turn()
        if len(turns_of(sample)) > 1:
            return Scored(1.0, True)
        said = turns_of(sample)[0].sampled
        forks = [
            policy.fork(name, [*prompt.tokens, *said[:2], number, MARK]) for number, name in enumerate("ab", start=20)
        ]
        await asyncio.gather(*(self.worked(fork) for fork in forks))
        if self.fails():
            raise AgentFailed("broken", "as told")
        policy.observe([*(fork.sample.response_tokens[0] for fork in forks), MARK])
        await policy.turn()
        return Scored(1.0, sample.sample_id.endswith("0"))

    async def worked(self, fork: Policy) -> None:
        await fork.turn()
        await self.gate.wait()


def play(act: Callable[[Scene], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def run() -> Any:
        settings = {"agent": Delegates(), "groups": 2, "size": 3, "max_new_tokens": 60, **options}
        async with asyncio.timeout(60), rollout(**settings) as made:
            for engine in made.engines:
                engine.answer = say
            return await act(made)

    return asyncio.run(run())


async def one_batch(made: Scene) -> tuple[dict[str, list[int]], BatchManifest]:
    await made.serve(0)
    manifest = await made.batch(1)
    payloads = made.store.payloads([sample.sample_id for sample in manifest.samples])
    return {one.sample_id: unpack_array(one.tokens, "int32").tolist() for one in payloads}, manifest


@pytest.mark.parametrize("chunk", [None, 4])
def test_forks_are_trained_in_the_group_of_their_parent_by_its_reward(chunk):
    async def act(made: Scene) -> None:
        tokens, manifest = await one_batch(made)
        assert len(manifest.samples) == 2 * 3 * 3
        by_id = {sample.sample_id: sample for sample in manifest.samples}
        for name, sample in by_id.items():
            parent = by_id[name.partition("~")[0]]
            assert (sample.group_id, sample.correct) == (parent.group_id, parent.correct)
            if "~" not in name:
                a, b = tokens[f"{name}~a"], tokens[f"{name}~b"]
                assert a[:4] == b[:4] == tokens[name][:4]
                assert (a[4], b[4]) == (20, 21)
                assert tokens[name][2 + LONG_SAID : 5 + LONG_SAID] == [a[6], b[6], MARK]
        hashes = {(sample.group_id, sample.prompt_hash) for sample in manifest.samples if "~" not in sample.sample_id}
        assert len(hashes) == 2
        assert len({sample.prompt_hash for sample in manifest.samples}) > 2 + 2 * 2, (
            "forks of siblings have other prompts"
        )
        made.scheduler.trained(manifest.batch_id)
        made.store.check()
        assert made.store.counts().trained == 18

    play(act, chunk_tokens=chunk)


def test_a2_forks_are_dropped_with_their_parent_under_its_reason():
    turns = cycle([False, False, False, True])

    async def act(made: Scene) -> None:
        await made.serve(0)
        for step in range(1, 5):
            manifest = await made.batch(step)
            names = {sample.sample_id for sample in manifest.samples}
            assert all({f"{name.partition('~')[0]}{end}" for end in ("", "~a", "~b")} <= names for name in names)
            made.scheduler.trained(manifest.batch_id)
            await made.serve(step)
        await made.settled()
        counts = made.store.counts()
        assert counts.dropped["agent_broken"] % 3 == 0
        assert counts.dropped["agent_broken"] >= 9
        assert counts.admitted == counts.trained + counts.buffered + counts.running + sum(counts.dropped.values())

    play(act, agent=Delegates(lambda: next(turns)))


def test_a6_a_parent_that_is_cancelled_takes_its_forks_along():
    agent = Delegates()

    async def act(made: Scene) -> None:
        agent.gate.clear()
        await made.serve(0)
        await made.until(lambda: len(made.store._states) == 18)
        tasks = list(made.scheduler._tasks.values())
        agent.gate.set()
        for task in tasks:
            task.cancel()
        await made.until(lambda: made.store.counts().dropped.get("cancelled", 0) == 18)
        manifest = await made.batch(1)
        assert len(manifest.samples) == 18
        await made.settled()

    play(act, agent=agent)


def test_c1_forks_go_on_after_a_restart_with_what_they_had():
    """Injected: the process ends while all forks wait, having said what they had to say."""
    agent = Delegates()

    async def before(made: Scene) -> RolloutState:
        agent.gate.clear()
        await made.serve(0)
        said = LONG_SAID * 3 * 6
        await made.until(lambda: sum(len(made.store.sample(one).response_tokens) for one in made.store._states) == said)
        return decode(encode(made.scheduler.state()), RolloutState)

    async def after(made: Scene) -> Any:
        made.scheduler.restore(state)
        tokens, _ = await one_batch(made)
        requests = [request for engine in made.engines for request in engine.requests]
        assert len(requests) == 6, "the parents' second turns, and nothing that was there"
        counts = made.store.counts()
        assert (counts.admitted, counts.buffered) == (18, 18)
        return tokens

    async def undisturbed(made: Scene) -> Any:
        return (await one_batch(made))[0]

    whole = play(undisturbed)
    state = play(before, agent=agent)
    assert sum("~" in name for group in state.groups for name in group.sample_ids) == 12
    assert all(len(without_forks(group)[0].sample_ids) == 3 for group in state.groups)
    assert play(after) == whole


def test_an_evaluation_may_fork_too():
    async def act(made: Scene) -> None:
        await made.serve(0)
        reply = await made.evaluation.run(EvaluateRequest(0, 10.0))
        assert (reply.prompts, reply.failures) == (6, 0)

    play(act)


def test_a7_a_fork_has_a_name_of_its_own_and_the_budget_that_its_prompt_leaves():
    policy = policy_of(new_sample(), Talker(lambda tokens, seed: [5] * 500), budget=20)
    fork = policy.fork("a", [3] * 12)
    assert asyncio.run(fork.turn()) == "length"
    assert len(fork.sample.tokens) == 2 + 20
    for name, prompt in (("a", [3]), ("b", [3] * 22), ("c", [])):
        with pytest.raises(PolicyError, match="cannot be forked"):
            policy.fork(name, prompt)
    asyncio.run(policy.turn())
    policy.close()
    policy.fork("d", [3])
    with pytest.raises(PolicyError, match="g/0~d: the loop returned"):
        policy.close()
