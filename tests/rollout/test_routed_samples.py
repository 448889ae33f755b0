"""What engines tell of routed experts travels with the sample: for each token what was chosen when it was first
computed, which is when the token behind it was sampled."""

import asyncio
import base64

import hypothesis.strategies as st
import numpy as np
import pytest
from fake_engine import LONG, go_on
from hypothesis import given, settings
from scene import Scene, rollout

from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.engine.routed_experts import RoutedExperts, RoutedExpertsError, asked_from, read_routed_experts
from slimerl.rollout.parts import Parts
from slimerl.rollout.routed import with_routing
from slimerl.samples.messages import unpack_array
from slimerl.samples.sample import Sample

PARTS = Parts(SamplingParams(40, stop_token_ids=(2,)), 1, chunk_tokens=7, routing=True)


def told(first: int, tokens: int, part: int) -> RoutedExperts:
    """Of each token its place, and which part computed it."""
    places = np.arange(first, tokens - 1, dtype=np.int16)
    return RoutedExperts(first, np.stack([places, np.full_like(places, part)], axis=1))


WHAT = ("part", "cut", "cut before it told any", "observed", "checkpoint")
STEP = st.tuples(st.sampled_from(WHAT), st.integers(0, 7))


@given(st.lists(STEP, max_size=12))
@settings(max_examples=150, deadline=None)
def test_m6_a_token_keeps_the_experts_of_the_request_that_first_computed_it(steps):
    """Fault: engines cut requests off, compute again what they have lost, and a tool speaks in between; the run starts
    again from its checkpoint."""
    sample = Sample("g/0", "g", "p", (10, 11, 12))
    expected: dict[int, int] = {}
    for part, (what, count) in enumerate(steps):
        if PARTS.is_complete(sample) or len(sample.response_tokens) > 25:
            break
        if what == "observed":
            sample.append([90] * count)
        elif what == "checkpoint":
            sample = Sample.restored(sample.saved(), "g")
        else:
            request = PARTS.next_request(sample)
            assert request.routing_from == len(sample.routing)
            tokens = [50] * (7 if what == "part" else count)
            whole = len(request.tokens) + len(tokens)
            known = told(request.routing_from, whole, part) if what != "cut before it told any" and tokens else None
            reason = "length" if what == "part" else "abort"
            PARTS.append(
                sample, Generation(tokens, [-0.5] * len(tokens), [0] * len(tokens), reason, {}, {}, routing=known)
            )
            if known is not None:
                expected |= dict.fromkeys(range(request.routing_from, whole - 1), part)
    rows = unpack_array(sample.payload().routing, "int16").reshape(-1, 2).tolist()
    places = range(len(sample.tokens)) if expected else []
    assert rows == [[place, expected[place]] if place in expected else [-1, -1] for place in places]


def test_a_second_choice_for_a_token_does_not_replace_the_first():
    """Fault: an engine that had to compute everything again tells all of it."""
    sample = Sample("s", "g", "p", (5, 6))
    sample.append([7, 8], [-0.1, -0.2], 0)
    sample.note_routing(0, np.full((3, 2), 1))
    sample.append([9], [-0.1], 1)
    sample.note_routing(0, np.full((4, 2), 2))
    assert unpack_array(sample.payload().routing, "int16").reshape(-1, 2)[:, 0].tolist() == [1, 1, 1, 2, -1]
    with pytest.raises(ValueError, match="last but one of 5"):
        sample.note_routing(4, np.full((1, 2), 3))


def test_m6_over_chunks_and_updates_each_tokens_experts_are_of_the_version_that_sampled_the_next():
    """End to end: requests, answers, store and payload. The engine tells place and version of what it computes."""

    async def run() -> None:
        options = {"chunk_tokens": 4, "max_new_tokens": LONG, "staleness": 2, "on_update": "drain", "routing": True}
        async with asyncio.timeout(60), rollout(**options) as made:
            for engine in made.engines:
                engine.answer = go_on
                engine.stops = lambda tokens: len(tokens) == 6 and tokens[1] % 2 == 0
            await made.serve(0)
            await made.until(lambda: any(engine.waiting for engine in made.engines))
            await spans_versions(made)

    asyncio.run(run())


async def spans_versions(made: Scene) -> None:
    serving = asyncio.ensure_future(made.serve(1))
    await made.until(lambda: made.scheduler.dispatcher.held)
    for engine in made.engines:
        engine.let_go()
    await serving
    seen = set()
    for step in (0, 1):
        manifest = await made.batch(step)
        for payload in made.store.payloads([meta.sample_id for meta in manifest.samples]):
            versions = unpack_array(payload.versions, "int32").tolist()
            count = payload.prompt_length + len(versions)
            rows = unpack_array(payload.routing, "int16").reshape(count, 2)
            assert rows[:-1, 0].tolist() == list(range(count - 1))
            assert rows[-1].tolist() == [-1, -1]
            assert rows[payload.prompt_length - 1 : -1, 1].tolist() == versions
            seen.add(tuple(sorted(set(versions))))
        made.scheduler.trained(manifest.batch_id)
    assert (0, 1) in seen, "some samples were begun under the old weights"
    asked = [each for engine in made.engines for each in engine.requests if each["return_routed_experts"]]
    assert {each["routed_experts_start_len"] for each in asked} > {0, 5}


def answer(rows: list[list[int]], **changes: object) -> dict[str, object]:
    return {"routed_experts": base64.b64encode(np.array(rows, "<i4").tobytes()).decode(), **changes}


def test_the_record_is_of_the_tokens_from_the_first_asked_for_to_the_last_but_one():
    found = read_routed_experts(answer([[1, 2, 3, 4], [5, 6, 7, 300]]), first=3, tokens=6)
    assert found is not None
    assert (found.first, found.rows.tolist(), found.rows.dtype) == (3, [[1, 2, 3, 4], [5, 6, 7, 300]], np.int16)
    assert asked_from(3) == {"return_routed_experts": True, "routed_experts_start_len": 3}
    assert read_routed_experts({}, first=3, tokens=6) is None


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        (answer([[1], [2], [3]]), "do not divide by 2"),
        (answer([[1], [40000]]), "which none can be"),
        (answer([[1], [-1]]), "which none can be"),
        ({"routed_experts": "?"}, "cannot be read"),
    ],
)
def test_a_record_of_other_tokens_is_refused(meta, said):
    with pytest.raises(RoutedExpertsError, match=said):
        read_routed_experts(meta, first=3, tokens=6)


def test_an_engine_that_was_asked_and_tells_nothing_is_an_error_unless_it_was_cut_off():
    def generation(reason: str) -> Generation:
        return Generation([7, 8], [-0.1] * 2, [0] * 2, reason, {}, {})

    with pytest.raises(RoutedExpertsError, match="--enable-return-routed-experts"):
        asyncio.run(with_routing(generation("stop"), 0, 3))
    assert asyncio.run(with_routing(generation("abort"), 0, 3)).routing is None
    assert asyncio.run(with_routing(generation("stop"), None, 3)).routing is None
