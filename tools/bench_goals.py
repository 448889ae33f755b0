"""Goals of the benches: what was measured beside what is wanted, and whether all were met."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """`at_least`: the measured value must not be below `bound`; else not above it."""

    name: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{'PASS' if self.met else 'FAIL'}  {self.name}: {_number(self.measured)} {sign} {_number(self.bound)}"


def judged(goals: Sequence[Goal]) -> int:
    """Prints every goal; returns the exit code: 1 where one was missed."""
    missed = [goal for goal in goals if not goal.met]
    print("\ngoals")
    for goal in goals:
        print(goal)
    print(f"{len(goals) - len(missed)} of {len(goals)} goals met", flush=True)
    return 1 if missed else 0


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
