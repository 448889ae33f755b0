"""Dynamic sampling: groups from which nothing can be learnt are replaced by others, up to a bound.

Flows in: whether each answer of a group is right, and counts of groups. Flows out: how many groups are still wanted, or
a clear stop. Pure. Invariant: accuracy alone decides, never the shaped reward: in a group of right answers a length
penalty makes rewards differ, and training on them would teach brevity alone.

Source: DAPO (arXiv 2503.14476).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slimerl.spec.algorithm import AlgorithmSpec


class NothingToLearn(RuntimeError):
    """Too many groups are all right or all wrong; the message says which, and what to do."""


def is_informative(correct: Sequence[bool | None]) -> bool:
    """Some answers of the group are right and some are wrong. An answer whose check failed (None) is neither."""
    return True in correct and False in correct


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

    def with_group(self, correct: Sequence[bool | None]) -> "GroupCount":
        """Counts one more group."""
        if is_informative(correct):
            return replace(self, kept=self.kept + 1)
        known = [each for each in correct if each is not None]
        if not known:
            return replace(self, unknown=self.unknown + 1)
        if known[0]:
            return replace(self, all_right=self.all_right + 1)
        return replace(self, all_wrong=self.all_wrong + 1)


def groups_wanted(spec: AlgorithmSpec, wanted: int, count: GroupCount) -> int:
    """How many further groups must be sampled so that the step has `wanted` ones to train on; 0: it is full.

    With `dynamic_sampling_rounds` these are informative ones, and at most rounds · wanted groups are sampled for one
    step; with 0 rounds every group is trained on.

    Args:
        wanted: groups of a step (training.prompts_per_step).
        count: groups of this step whose answers have been judged.

    Raises:
        NothingToLearn: the bound is reached and the step is not full.
    """
    rounds = spec.dynamic_sampling_rounds
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
