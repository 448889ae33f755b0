"""Tools and environments as users write them, good and bad, for workers to load."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from slimerl.environments.environment import OneByOne, Start, Step, Task


def shout(argument: str) -> str:
    """Writes a text in capitals."""
    return argument.upper()


def odd(argument: str) -> str:
    match argument:
        case "raise":
            raise KeyError("no such entry")
        case "number":
            return 7  # type: ignore[return-value]
        case "hang":
            time.sleep(3600)
        case "die":
            os._exit(3)
        case "memory":
            return "x" * len(bytearray(2**40))
    return argument


def two(first: str, second: str) -> str:
    return first + second


class Guess:
    """A number to be found by higher and lower."""

    def reset(self, task: Task) -> str:
        self.secret = int(task.answer)
        return f"below {task.seed % 7 + 100}"

    def step(self, action: str) -> Step:
        if action == "hang":
            time.sleep(3600)
        if action == "die":
            os._exit(3)
        if action == "raise":
            raise ValueError("not an action")
        said = int(action)
        if said == self.secret:
            return Step(reward=1.0, done=True)
        return Step("higher" if said < self.secret else "lower", reward=-0.1)


def guess() -> OneByOne:
    return OneByOne(Guess)


@dataclass
class Counter:
    """Vectorised; each observation says how many episodes its call had. Done when told."""

    wrong_count: bool = False

    def reset(self, tasks: Sequence[Task]) -> list[Start]:
        return [Start(None, f"reset {len(tasks)}") for _ in tasks]

    def step(self, states: Sequence[None], actions: Sequence[str]) -> list[Step]:
        steps = [Step(f"step {len(actions)}", reward=1.0, done=action == "end") for action in actions]
        return steps[1:] if self.wrong_count else steps


def counter(wrong_count: bool = False) -> Counter:
    return Counter(wrong_count)


def no_environment() -> int:
    return 7


class Forgetful(Guess):
    """Other observations in each process."""

    def step(self, action: str) -> Step:
        step = super().step(action)
        return Step(f"{step.observation} {os.getpid()}", step.reward, step.done)


def forgetful() -> OneByOne:
    return OneByOne(Forgetful)
