"""A function of the user's as reward: `reward.function`, by import path. Runs in a worker process."""

from collections.abc import Callable

from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored
from slimerl.spec.functions import load_function

PARAMETERS = ("request",)
"""(request: RewardRequest) → `Scored`, `Unparsable` or `Failed`; True and False are short for reward 1 and 0."""


def scorer(function: str) -> Callable[[RewardRequest], Outcome]:
    """Raises CustomFunctionError."""
    judge = load_function(function, PARAMETERS, "reward.function")

    def score(request: RewardRequest) -> Outcome:
        given = judge(request)
        if isinstance(given, bool):
            return Scored(float(given), given)
        if not isinstance(given, Outcome):
            return Failed("bad_return", f"{function} gave {type(given).__name__}, not an Outcome, True or False")
        return given

    return score
