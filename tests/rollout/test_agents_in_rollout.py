"""Agent loops in a whole rollout: books balance, nothing is lost in updates, chunks, faults and restarts."""

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
from scene import SEED, Scene, rollout

from slimerl.rewards.outcome import Failed, RewardRequest, Scored
from slimerl.rollout.prompts import sampling_seed
from slimerl.samples.messages import BatchManifest, EvaluateRequest, RolloutState, decode, encode, unpack_array

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))
from talker import STOP, HereToolbox, talk, tool_loop

Play = Callable[[Scene], Coroutine[Any, Any, Any]]
LONG = {"max_new_tokens": 100, "size": 4}


def play(act: Play, **options: Any) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(60), rollout(**{"agent": tool_loop(), **LONG, **options}) as made:
            for engine in made.engines:
                engine.answer = talk
            made.reward.verdict = repeats_the_product
            return await act(made)

    return asyncio.run(run())


def repeats_the_product(request: RewardRequest) -> Scored:
    """The scene's judge decodes tokens to numbers; only what was said last must get here."""
    digits = "".join(chr(int(token)) for token in request.response.split() if int(token) != STOP)
    correct = digits.isdigit() and int(digits) % max(1, int(request.answer)) == 0
    return Scored(float(correct), correct)


def tokens_of(made: Scene, manifest: BatchManifest, name: str = "tokens") -> dict[str, list[int]]:
    dtype = {"sampled": "uint8"}.get(name, "int32")
    payloads = made.store.payloads([sample.sample_id for sample in manifest.samples])
    return {one.sample_id: unpack_array(getattr(one, name), dtype).tolist() for one in payloads}


def expected(sample_id: str, prompt: list[int]) -> list[int]:
    seed = sampling_seed(SEED, sample_id, 0)
    call = talk(prompt, seed)
    product = str(eval(bytes(call[5:-3]).decode()))
    return [*prompt, *call, *product.encode(), ord("\n"), *product.encode(), STOP]


async def one_batch(made: Scene) -> tuple[dict[str, list[int]], BatchManifest]:
    await made.serve(0)
    manifest = await made.batch(1)
    return tokens_of(made, manifest), manifest


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 3}], ids=["whole turns", "chunks"])
def test_m6_samples_hold_what_was_sampled_and_observed_and_requests_continue_each_other(options):
    async def scene(made: Scene) -> None:
        tokens, manifest = await one_batch(made)
        for sample in manifest.samples:
            assert tokens[sample.sample_id] == expected(sample.sample_id, tokens[sample.sample_id][:2])
            assert sample.correct, "what was said last is judged"
        sampled = tokens_of(made, manifest, "sampled")
        versions = tokens_of(made, manifest, "versions")
        for name, marks in sampled.items():
            assert [version == 0 for version in versions[name]] == [bool(mark) for mark in marks]
            assert 0 < marks.count(0) < len(marks) / 2
        by_session: dict[str, list[list[int]]] = {}
        for request in [request for engine in made.engines for request in engine.requests]:
            by_session.setdefault(request["rid"].partition("#")[0].partition("+")[0], []).append(request["input_ids"])
        for inputs in by_session.values():
            assert len(inputs) >= 2
            for before, after in pairwise(sorted(inputs, key=len)):
                assert after[: len(before)] == before
        metrics = manifest.metrics
        assert metrics["rollout/turns_mean"] == metrics["rollout/turns_max"] == 2
        assert metrics["agent/tool_calls"] == len(manifest.samples)
        assert "agent/tool_failures" not in metrics
        observed = sum(marks.count(0) for marks in sampled.values()) / sum(map(len, sampled.values()))
        assert metrics["rollout/observed_fraction"] == pytest.approx(observed)
        assert metrics["rollout/interruptions"] == (0 if not options else metrics["rollout/interruptions"])

    play(scene, **options)


def test_an_evaluation_takes_the_same_turns():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        reply = await made.evaluation.run(EvaluateRequest(0, 10.0))
        assert (reply.prompts, reply.failures, reply.accuracy) == (6, 0, 1.0)
        assert reply.mean_response_tokens > 15

    play(scene)


def test_a2_broken_tools_drop_their_samples_under_their_name_and_the_others_go_on():
    """Injected: each third call, its tool's worker is killed at its deadline."""
    faults = cycle([None, None, Failed("timeout", "no answer within 1 s")])

    async def scene(made: Scene) -> None:
        await made.serve(0)
        for step in range(1, 4):
            manifest = await made.batch(step)
            made.scheduler.trained(manifest.batch_id)
            await made.serve(step)
        await made.settled()
        counts = made.store.counts()
        assert counts.dropped["agent_tool_timeout"] >= 6
        assert counts.admitted == counts.trained + counts.buffered + counts.running + sum(counts.dropped.values())

    play(scene, agent=tool_loop(HereToolbox(faults)))


def test_a2_books_balance_through_faults_of_engines_and_tools_and_cancellations():
    chance = random.Random(5)
    faults = (chance.choice([None, None, None, None, Failed("worker_died", "")]) for _ in iter(int, 1))

    async def scene(made: Scene) -> None:
        await made.serve(0)
        for step in range(1, 6):
            for engine in made.engines:
                engine.faults.extend(chance.choice(["", "", "500", "drop"]) for _ in range(6))
            for task in chance.sample(list(made.scheduler._tasks.values()), k=min(2, len(made.scheduler._tasks))):
                task.cancel()
            manifest = await made.batch(step)
            for sample in manifest.samples:
                found = tokens_of(made, manifest)[sample.sample_id]
                assert found == expected(sample.sample_id, found[:2])
            made.scheduler.trained(manifest.batch_id)
            await made.serve(step)
        await made.settled()
        counts = made.store.counts()
        assert counts.admitted == counts.trained + counts.buffered + counts.running + sum(counts.dropped.values())
        assert not made.router.running()

    play(scene, agent=tool_loop(HereToolbox(faults)), chunk_tokens=5, groups=3)


class HangingToolbox(HereToolbox):
    """Answers two calls and no more."""

    def __init__(self, answered: Callable[[], None]) -> None:
        super().__init__()
        self.answered, self.left, self.hanging = answered, 2, 0

    async def call(self, call: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            self.hanging += 1
            await asyncio.Event().wait()
        if self.left == 0:
            self.answered()
        return await super().call(call)


def test_c1_conversations_that_were_under_way_go_on_after_a_restart():
    """Injected: the process ends while some samples are in their first turn, some at the tool, some in their second."""
    engines: list[Any] = []
    toolbox = HangingToolbox(lambda: engines[1].open.clear())

    def stops_after(engine: Any, answers: int) -> Callable[..., list[int]]:
        left = iter(range(answers, 0, -1))

        def answer(tokens: list[int], seed: int) -> list[int]:
            if next(left, 0) == 1:
                engine.open.clear()
            return talk(tokens, seed)

        return answer

    async def undisturbed(made: Scene) -> Any:
        return (await one_batch(made))[0]

    async def before(made: Scene) -> RolloutState:
        engines.extend(made.engines)
        made.engines[0].answer = stops_after(made.engines[0], 4)
        await made.serve(0)
        await made.until(lambda: sum(len(engine.waiting) for engine in made.engines) + toolbox.hanging == 8)
        return decode(encode(made.scheduler.state()), RolloutState)

    async def after(made: Scene) -> Any:
        made.scheduler.restore(state)
        return (await one_batch(made))[0]

    whole = play(undisturbed)
    state = play(before, chunk_tokens=5, agent=tool_loop(toolbox))
    places = set()
    for sample in (each for group in state.groups for each in group.begun):
        observed = 0 in unpack_array(sample.payload.sampled, "uint8").tolist()
        places.add("second" if observed else "tool" if sample.finish_reason == "stop" else "first")
    assert places == {"first", "tool", "second"}
    assert play(after, chunk_tokens=5) == whole
