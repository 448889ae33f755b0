"""The staleness rule: when a new group may be dispatched, and which finished groups make the next batch. Pure.

Flows in: what became of the groups, and each new policy version. Flows out: `may_admit`, `choose_batch`.

A group may be admitted only while (the rule of AReaL, here for every mode)::

    accepted + running < (max_staleness + version + 1) * groups_per_step

Example: 4 groups per step, max_staleness 0: four start under version 0, and not one more before version 1.

Over-sampling with early stop (APRIL, arXiv 2509.18521) bounds what is under way further: of the oversample *
groups_per_step groups that are not trained yet the first complete ones are the batch, the others stay as partial
samples.

Invariant: no group is trained more than `max_staleness` versions after its admission. The gate alone does not give
that where finished groups overtake slow ones (a straggler of version 0 could wait for ever), so `choose_batch` lets
a group be overtaken only as long as the coming batches have room for everything that must be in them. By induction
that room is never short: before step k at most (max_staleness + 1) * groups_per_step groups are untrained.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slimerl.samples.store import GroupView


def choose_batch(groups: Sequence[GroupView], step: int, groups_per_step: int, max_staleness: int) -> list[str] | None:
    """The groups of the batch of `step` (batches taken before it): the oldest finished ones.

    Args:
        groups: every group that is in no batch yet, in admission order.

    Returns:
        Group ids in admission order; None while too few are finished, or while an unfinished one must not be
        left behind.
    """
    chosen = [group.group_id for group in groups if group.ready][:groups_per_step]
    if len(chosen) < groups_per_step:
        return None
    taken = set(chosen)
    left = 0
    for group in groups:
        if group.group_id in taken:
            continue
        left += 1
        # All that are left up to this one must fit into the batches up to the last step that may train it.
        if left > (group.version + max_staleness - step) * groups_per_step:
            return None
    return chosen


class GateError(RuntimeError):
    """The gate was told something that cannot be."""


@dataclass
class StalenessGate:
    """Counts are in groups. `steps`: the run ends there, so that nothing is admitted that no step would train."""

    groups_per_step: int
    max_staleness: int
    steps: int
    version: int = -1
    """Newest policy version that engines serve; -1 before the first."""
    running: int = 0
    accepted: int = 0
    """Finished and not dropped, since the start of the run: trained ones stay counted."""
    oversample: float | None = None
    """Steps' worth of groups under way; None: as many as may be, which is max_staleness + 1."""

    @property
    def limit(self) -> int:
        """Groups that may have been admitted by now."""
        if self.oversample is None or self.version < 0:
            return self._stale_limit
        ahead = math.ceil(self.oversample * self.groups_per_step)
        return min(self.version * self.groups_per_step + ahead, self._stale_limit)

    @property
    def _stale_limit(self) -> int:
        if self.version < 0:
            return 0
        return min(self.max_staleness + self.version + 1, self.steps) * self.groups_per_step

    @property
    def next_batch(self) -> int:
        """Number of the batch that the next group is due in, where none overtakes another."""
        return (self.accepted + self.running) // self.groups_per_step

    def may_admit(self) -> bool:
        return self.accepted + self.running < self.limit

    def admit(self) -> int:
        """Returns the version under which it is. Raises GateError when the rule forbids it."""
        self._admit(self.limit)
        return self.version

    def admit_again(self) -> None:
        """A group of an earlier process, which may have over-sampled more than this one is to.

        Raises:
            GateError: it is staler than this one may have any.
        """
        self._admit(self._stale_limit)

    def check_ages(self, versions: Sequence[int]) -> None:
        """Of groups of an earlier process, in the order in which they are due, admitted under `versions` there. To be
        called before one of them is accepted here.

        Raises:
            GateError: one would be too old here once those before it are trained; no batch could be chosen then.
        """
        trained = self.accepted // self.groups_per_step
        ages = [trained + before // self.groups_per_step - version for before, version in enumerate(versions)]
        age = max(ages, default=0)
        if age > self.max_staleness:
            version = versions[ages.index(age)]
            raise GateError(
                f"a group that was begun at version {version} would be trained at version {version + age}: "
                f"rollout.max_staleness is {self.max_staleness}; set it to {age} or more, as it was"
            )

    def _admit(self, limit: int) -> None:
        if self.accepted + self.running >= limit:
            raise GateError(
                f"group refused: {self.accepted} accepted + {self.running} running reach the limit of {limit} "
                f"at version {self.version} with max_staleness {self.max_staleness}"
            )
        self.running += 1

    def accept(self) -> None:
        """A running group is ready."""
        self._end_one()
        self.accepted += 1

    def drop(self) -> None:
        """A running group came to nothing; another may take its place."""
        self._end_one()

    def reopen(self) -> None:
        """An accepted group that no step has trained is lost, and made again."""
        if self.accepted <= 0:
            raise GateError("a group is made again, but none was accepted")
        self.accepted -= 1
        self.running += 1

    def advance(self, version: int) -> None:
        """Engines serve `version` now. Raises GateError when it is older than the present one."""
        if version < self.version:
            raise GateError(f"policy version {version} is older than {self.version}")
        self.version = version

    def resume(self, version: int) -> None:
        """Start again after `version` finished steps: exactly their groups count as accepted."""
        if self.running:
            raise GateError(f"cannot resume with {self.running} groups running")
        self.version = version
        self.accepted = version * self.groups_per_step

    def _end_one(self) -> None:
        if self.running == 0:
            raise GateError("a group ended, but none is running")
        self.running -= 1
