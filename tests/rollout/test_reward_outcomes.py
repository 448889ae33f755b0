"""Every way in which judging can come out, through the whole rollout: each counted under its own name, none lost."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from scene import rollout

from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored, Unparsable, outcome_name
from slimerl.rollout.agents.loop import SingleTurn

FAILURES = [
    *("timeout", "worker_died", "memory", "sandbox", "bad_answer", "no_worker", "bad_return", "not_finite"),
    *("garbled", "unreachable", "disconnected", "server_error", "busy", "refused", "circuit_open", "judge_unreadable"),
]
VERDICTS = ["time_limit", "memory_limit", "output_limit", "crashed", "raised", "output", "check", "ended_early"]
OUTCOMES: list[Outcome] = [
    Scored(1.0, True),
    Scored(0.0, False),
    Unparsable(),
    *(Scored(0.0, False, verdict) for verdict in VERDICTS),
    *(Failed(reason, "injected") for reason in FAILURES),
]


@pytest.mark.parametrize("on_failure", ["drop", "zero"])
def test_r2_every_outcome_is_counted_under_its_own_name_and_no_sample_is_lost(on_failure):
    """Faults: each of them in turn, over enough samples that each comes up several times."""
    given: Counter[str] = Counter()

    def verdict(_: RewardRequest) -> Outcome:
        outcome = OUTCOMES[sum(given.values()) % len(OUTCOMES)]
        given[outcome_name(outcome)] += 1
        return outcome

    async def scene() -> tuple[Counter[str], Counter[str], bool]:
        async with rollout(groups=4, size=8, on_reward_failure=on_failure) as made:
            made.reward.verdict = verdict
            await made.serve(0)
            told: Counter[str] = Counter()
            for step in range(1, 4):
                manifest = await made.batch(step)
                made.scheduler.trained(manifest.batch_id)
                told += _counts(manifest.metrics)
                await made.serve(step)
            await made.settled()
            told += _counts(made.scheduler.judge.take_figures())
            counts = made.store.counts()
            whole = counts.admitted == counts.trained + counts.buffered + counts.running + sum(counts.dropped.values())
            return told, Counter(counts.dropped), whole

    told, dropped, whole = asyncio.run(scene())
    assert told == given
    assert set(given) == {outcome_name(outcome) for outcome in OUTCOMES}
    assert whole
    failed = Counter({f"reward_{reason}": given[f"failed_{reason}"] for reason in FAILURES})
    assert {name: number for name, number in dropped.items() if name.startswith("reward_")} == (
        dict(failed) if on_failure == "drop" else {}
    )


def test_r2_outcomes_have_names_of_their_own():
    names = [outcome_name(outcome) for outcome in OUTCOMES]
    assert len(set(names)) == len(names)


def _counts(metrics: dict[str, float]) -> Counter[str]:
    prefix = "reward/"
    return Counter({name.removeprefix(prefix): int(n) for name, n in metrics.items() if name.startswith(prefix)})


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), 1e39])
def test_r2_a_reward_that_is_no_number_costs_its_sample_whoever_gave_it(reward):
    """Injected: an agent loop that judges by itself, or a sum of parts, gives NaN, or what float32 does not hold. All
    trainer ranks would end with it, and again when the run goes on."""

    class Judging(SingleTurn):
        async def __call__(self, policy: Any, sample: Any, prompt: Any) -> Outcome:
            await super().__call__(policy, sample, prompt)
            return Scored(reward if sample.sample_id.endswith("/0") else 1.0, True)

    async def scene() -> None:
        async with rollout(agent=Judging()) as made:
            await made.serve(0)
            manifest = await made.batch(1)
            assert {sample.reward for sample in manifest.samples} == {1.0}
            assert manifest.metrics["reward/failed_not_finite"] == 2
            assert made.store.counts().dropped == {"reward_not_finite": 2}

    asyncio.run(scene())
