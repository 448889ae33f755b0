"""Dynamic sampling: groups from which nothing can be learnt are replaced by others, up to a bound. Pure.

Flows in: whether each answer of a finished group is right. Flows out: whether the group is kept, or a clear stop.
Invariants: accuracy alone decides, never the shaped reward: in a group of right answers a length penalty makes rewards
differ, and training on them would teach brevity alone. For each step's worth of kept groups at most rounds times as
many are looked at.

Source: DAPO (arXiv 2503.14476).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Verdicts = Sequence[bool | None]
"""Of the answers of one group: right, wrong, or None where the check failed."""
Kind = Literal["kept", "all_right", "all_wrong", "unknown"]

DROP_REASONS: dict[Kind, str] = {
    "all_right": "group_all_right",
    "all_wrong": "group_all_wrong",
    "unknown": "group_not_judged",
}
"""Under which reason the store counts the samples of a replaced group."""


class NothingToLearn(RuntimeError):
    """Too many groups are all right or all wrong; the message says which, and what to do."""


def kind_of(correct: Verdicts) -> Kind:
    """Kept: some answers of the group are right and some are wrong. One whose check failed is neither."""
    if True in correct and False in correct:
        return "kept"
    if True in correct:
        return "all_right"
    return "all_wrong" if False in correct else "unknown"


@dataclass(frozen=True)
class GroupCount:
    """Groups of one step so far, by what became of them."""

    kept: int = 0
    all_right: int = 0
    all_wrong: int = 0
    unknown: int = 0

    @property
    def sampled(self) -> int:
        return self.kept + self.all_right + self.all_wrong + self.unknown

    def with_group(self, correct: Verdicts) -> "GroupCount":
        """Counts one more group."""
        kind = kind_of(correct)
        return replace(self, **{kind: getattr(self, kind) + 1})


def groups_wanted(rounds: int, wanted: int, count: GroupCount) -> int:
    """How many further groups must be sampled so that the step has `wanted` ones to train on; 0: it is full.

    Args:
        rounds: algorithm.dynamic_sampling_rounds; at most rounds * wanted groups are sampled for one step. 0: every
            group is trained on.
        wanted: groups of a step (training.prompts_per_step).
        count: groups of this step whose answers have been judged.

    Raises:
        NothingToLearn: the bound is reached and the step is not full.
    """
    if rounds == 0:
        return max(0, wanted - count.sampled)
    missing = wanted - count.kept
    if missing <= 0:
        return 0
    left = rounds * wanted - count.sampled
    if left <= 0:
        raise NothingToLearn(
            f"dynamic sampling found {count.kept} of {wanted} groups with both right and wrong answers among "
            f"{count.sampled} sampled ({count.all_right} all right, {count.all_wrong} all wrong, {count.unknown} not "
            f"judged), the bound of algorithm.dynamic_sampling_rounds = {rounds}. {_advice(count)}"
        )
    return min(missing, left)


def _advice(count: GroupCount) -> str:
    if count.unknown > max(count.all_right, count.all_wrong):
        return "Look at the reward: most answers could not be judged"
    if count.all_wrong >= count.all_right:
        return "Give easier prompts or raise rollout.samples_per_prompt, or look at the reward: almost nothing is right"
    return "Give harder prompts: almost everything is right"


@dataclass
class InformativeGroups:
    """The choice over a whole run, group after group as they finish.

    A step's worth of kept groups begins a new count. Where groups run ahead of their step, or a resumed run begins in
    the middle of one, counts and batches are out of step by a few groups; the bound holds all the same.
    """

    rounds: int
    """0: every group is kept."""
    groups_per_step: int
    _count: GroupCount = GroupCount()
    _replaced: list[Verdicts] = field(default_factory=list)

    def add(self, correct: Verdicts) -> str | None:
        """One more group is finished. Returns under which reason it is dropped; None: it is kept."""
        if self.rounds == 0:
            return None
        kind = kind_of(correct)
        self._count = self._count.with_group(correct)
        if kind != "kept":
            self._replaced.append(correct)
            return DROP_REASONS[kind]
        if self._count.kept == self.groups_per_step:
            self._count = GroupCount()
        return None

    def check(self) -> None:
        """Raises NothingToLearn when no further group may be looked at."""
        groups_wanted(self.rounds, self.groups_per_step, self._count)

    def take_replaced(self) -> list[Verdicts] | None:
        """Of the groups that were replaced since the last call; None where none ever is."""
        replaced, self._replaced = self._replaced, []
        return replaced if self.rounds else None
