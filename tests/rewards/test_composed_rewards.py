"""Weighted sums, functions of the user's own, and what the metrics say of them."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from slimerl.rewards.build import build_reward, reads_prompt
from slimerl.rewards.composite import Part, WeightedSum
from slimerl.rewards.outcome import Events, Failed, Outcome, RewardRequest, RewardUnavailable, Scored, Unparsable
from slimerl.spec.reward import CompositeReward, FunctionReward

REQUEST = RewardRequest("s", "the response", "42")


class Fixed:
    """Always the same outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.events, self.started, self.closed = outcome, Events(asked=0), False, False

    async def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        self.closed = True

    def take_events(self) -> Counter[str]:
        return self.events.take()

    async def score(self, _: RewardRequest) -> Outcome:
        self.events["asked"] += 1
        return self.outcome


def total(*parts: tuple) -> tuple[Outcome, Counter[str]]:
    """(weight, outcome[, on_failure]) of each part → what comes of it."""
    made = WeightedSum([Part(weight, Fixed(outcome), *rest) for weight, outcome, *rest in parts])
    outcome = asyncio.run(made.score(REQUEST))
    return outcome, made.take_events()


RIGHT, WRONG = Scored(1.0, True), Scored(0.0, False, "output")


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        ([(0.8, RIGHT), (0.2, WRONG)], Scored(0.8, True)),
        ([(0.8, WRONG), (0.2, RIGHT)], Scored(0.2, False, "output")),
        ([(1.0, RIGHT), (-0.5, Scored(3.0, False))], Scored(-0.5, True)),
        ([(1.0, RIGHT), (1.0, Unparsable())], Scored(1.0, True)),
        ([(1.0, Unparsable()), (1.0, RIGHT)], Unparsable()),
        ([(1.0, RIGHT), (1.0, Failed("timeout", "t"))], Failed("timeout", "part 1: t")),
        ([(1.0, RIGHT), (1.0, Failed("timeout", "t"), "zero")], Scored(1.0, True)),
        ([(1.0, Failed("a", "x"), "zero"), (1.0, RIGHT)], Failed("a", "part 0: x")),
        ([(1.0, Unparsable()), (1.0, Failed("a", "x"))], Failed("a", "part 1: x")),
    ],
)
def test_r2_the_first_part_says_what_is_correct_and_failure_is_never_a_zero_by_itself(parts, outcome):
    assert total(*parts)[0] == outcome


def test_what_happens_to_parts_is_counted_by_part():
    _, events = total((1.0, Unparsable()), (1.0, Failed("timeout"), "zero"), (1.0, Failed("garbled")))
    assert events == Counter(asked=3, part_0_unparsable=1, part_1_failed_timeout=1, part_2_failed_garbled=1)


def test_all_parts_start_and_end_together():
    parts = [Fixed(RIGHT), Fixed(RIGHT)]
    made = WeightedSum([Part(1.0, part) for part in parts])
    asyncio.run(made.start())
    asyncio.run(made.close())
    assert all(part.started and part.closed for part in parts)


# --- functions


def exact(request: RewardRequest) -> Outcome:
    return Scored(float(len(request.response)), request.response == request.answer)


def short_form(request: RewardRequest) -> bool:
    return request.answer == "42"


def sees_the_prompt(request: RewardRequest) -> bool:
    return request.prompt == "asked"


def garbage(request: RewardRequest) -> object:
    return {"reward": 1.0}


def raising(request: RewardRequest) -> bool:
    raise KeyError("no such thing")


def with_other_parameters(response: str, answer: str) -> bool:
    return True


def spec_of(function: str, **options) -> FunctionReward:
    return FunctionReward(kind="function", function=f"test_composed_rewards:{function}", **options)


@pytest.fixture
def _workers_find_this_module(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def judged(spec, request: RewardRequest = REQUEST) -> Outcome:
    async def scene() -> Outcome:
        reward = build_reward(spec)
        try:
            await reward.start()
            return await reward.score(request)
        finally:
            await reward.close()

    return asyncio.run(scene())


@pytest.mark.usefixtures("_workers_find_this_module")
@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        ("exact", Scored(12.0, False)),
        ("short_form", Scored(1.0, True)),
        ("sees_the_prompt", Scored(0.0, False)),
        (
            "garbage",
            Failed("bad_return", "test_composed_rewards:garbage gave dict, not an Outcome, True or False"),
        ),
        ("raising", Failed("error", "KeyError: 'no such thing'")),
    ],
)
def test_r2_a_function_of_the_users_judges_in_a_worker(function, outcome):
    """Faults: it gives back something else, and it raises."""
    assert judged(spec_of(function)) == outcome


@pytest.mark.usefixtures("_workers_find_this_module")
@pytest.mark.parametrize(
    ("function", "fault"),
    [("with_other_parameters", r"takes \(response, answer\), it must take \(request\)"), ("absent", "cannot load")],
)
def test_a_function_that_does_not_fit_is_said_at_the_start(function, fault):
    with pytest.raises(RewardUnavailable, match=fault):
        judged(spec_of(function))


@pytest.mark.usefixtures("_workers_find_this_module")
def test_a_composite_of_the_spec_judges_with_all_its_parts():
    parts = [
        {"weight": 1.0, "reward": {"kind": "math"}},
        {"weight": 0.25, "reward": {"kind": "function", "function": "test_composed_rewards:sees_the_prompt"}},
    ]
    spec = CompositeReward.model_validate({"kind": "composite", "parts": parts})
    assert reads_prompt(spec)
    assert judged(spec, RewardRequest("s", "so it is 42", "42", "asked")) == Scored(1.25, True, said="42")
    assert judged(spec, RewardRequest("s", "so it is 41", "42", "asked")) == Scored(0.25, False, said="41")
