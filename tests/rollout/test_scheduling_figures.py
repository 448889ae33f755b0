"""Figures of the scheduling: how evenly engines were loaded, what moved, how far lengths were foretold amiss."""

import asyncio

import pytest
from scene import rollout

from slimerl.rollout.load_figures import LoadFigures
from slimerl.rollout.statistics import GroupRecord, length_error, partial_metrics, token_staleness
from slimerl.samples.messages import SampleMeta
from slimerl.samples.sample import Sample


def meta(group: str, tokens: int) -> SampleMeta:
    return SampleMeta(f"{group}/{tokens}", group, 2, tokens, tokens, 0, 0, 1.0, True, "stop")


def test_the_spread_is_that_of_the_loads_at_the_ends_of_requests():
    figures = LoadFigures(clock=lambda: 0.0)
    for engine in ("a", "a", "a", "b"):
        figures.taken(engine)
    figures.given_back("b", ["a", "b"])  # 3 : 1
    figures.given_back("a", ["a", "b"])  # 3 : 0
    assert figures.take(5, 2) == {
        "rollout/engine_idle_share": 0.0,
        "rollout/engine_load_spread": pytest.approx((1.5 + 2.0) / 2),
        "rollout/migrations": 5.0,
        "rollout/taken_back": 2.0,
    }
    assert figures.take(6, 2) == {
        "rollout/engine_idle_share": 0.0,
        "rollout/engine_load_spread": 0.0,
        "rollout/migrations": 1.0,
        "rollout/taken_back": 0.0,
    }


def test_failed_tries_are_counted_by_reason_once():
    figures = LoadFigures(clock=lambda: 0.0)
    for reason in ("timeout", "bad_answer", "timeout"):
        figures.tried_again(reason)
    told = {name: each for name, each in figures.take(0, 0).items() if "tried" in name}
    assert told == {"rollout/tried_again_timeout": 2.0, "rollout/tried_again_bad_answer": 1.0}
    assert not any("tried" in name for name in figures.take(0, 0))


def test_an_engine_is_idle_while_it_has_no_request_also_one_that_never_had_any():
    now = 0.0
    figures = LoadFigures(clock=lambda: now)
    figures.taken("a")
    now = 4.0
    figures.given_back("a", ["a", "b"])
    now = 10.0
    # a: 6 of 10 s; b, which was first heard of when it was in service: 10 of 10
    assert figures.take(0, 0)["rollout/engine_idle_share"] == pytest.approx((6 + 10) / 20)
    now = 15.0
    figures.taken("b")
    now = 20.0
    assert figures.take(0, 0)["rollout/engine_idle_share"] == pytest.approx((10 + 5) / 20)


def test_staleness_is_counted_by_token_and_not_by_sample():
    short, long = (Sample(name, "g", "p", (1, 2)) for name in ("short", "long"))
    short.append([5], [-0.1], version=3)
    long.append([5, 6], [-0.1] * 2, version=2)
    long.append([7, 7, 7, 7])  # a tool's: no policy's
    long.append([8], [-0.1], version=4)
    assert token_staleness([short.payload(), long.payload()], version=4) == {
        "staleness/tokens_behind_0": 0.25,
        "staleness/tokens_behind_1": 0.25,
        "staleness/tokens_behind_2": 0.5,
    }


def test_the_error_of_lengths_is_over_groups_of_which_something_was_foretold():
    samples = [meta("a", 10), meta("a", 30), meta("b", 50), meta("c", 7)]
    records = {"a": GroupRecord(), "b": GroupRecord(), "c": GroupRecord()}
    records["a"].foretold_tokens, records["b"].foretold_tokens = 25.0, 50.0
    assert length_error(samples, records)["rollout/length_error"] == pytest.approx((0.25 + 0.0) / 2)
    assert length_error(samples[3:], {"c": records["c"]}) == {}


def test_only_samples_that_are_half_generated_are_partial():
    begun, new, whole = (Sample(name, "g", "p", (1, 2)) for name in ("begun", "new", "whole"))
    begun.append([5, 6, 7], [-0.1] * 3, 0)
    whole.append([5], [-0.1], 0)
    whole.finish_reason = "stop"
    assert partial_metrics([begun, new, whole]) == {"rollout/partial_samples": 1.0, "rollout/partial_tokens": 3.0}


def test_a_batch_tells_them():
    """The second epoch is foretold by the first, whose lengths repeat here."""

    async def scene() -> tuple[dict[str, float], dict[str, float]]:
        async with asyncio.timeout(30), rollout(groups=16, size=2, capacity=4, staleness=1, steps=2) as made:
            for engine in made.engines:
                engine.answer = lambda tokens, seed: [5] * (2 + tokens[1]) + [2]
            await made.serve(0)
            first = await made.batch(0)
            await made.serve(1)
            return first.metrics, (await made.batch(1)).metrics

    first, second = asyncio.run(scene())
    assert 1.0 <= first["rollout/engine_load_spread"] <= 2.0
    assert first["rollout/engines"] == 2
    assert first["rollout/length_error"] > 0.3, "nothing was known"
    assert second["rollout/length_error"] == 0.0
    assert second["rollout/partial_samples"] == second["rollout/migrations"] == second["rollout/taken_back"] == 0
