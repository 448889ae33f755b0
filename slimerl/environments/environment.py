"""The interface of environments, as a user writes one.

Flows in: tasks and actions of many episodes at once. Flows out: what is observed, and rewards.
Invariant: an episode is repeatable: the same task and actions give the same observations and rewards, in this process
or another. Chance comes from `Task.seed`.

Example, a guessing game::

    class Guess:
        def reset(self, task: Task) -> str:
            self.secret = task.seed % 10
            return ""                                  # the prompt says it all

        def step(self, action: str) -> Step:
            right = action.strip() == str(self.secret)
            return Step("higher or lower", reward=float(right), done=right)

    def make() -> Environment:
        return OneByOne(Guess)

with `agent: {kind: environment, environment: "my_package.games:make"}`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


class Task(msgspec.Struct, frozen=True):
    """What an episode is about: the row's prompt as the model got it, and its answer. The samples of a group have the
    same, `seed` included."""

    prompt: str
    answer: str
    seed: int


@dataclass(frozen=True, slots=True)
class Start:
    """`state`: of one episode, anything; handed to each of its steps. `observation`: shown before the first action;
    empty: the prompt says it all."""

    state: Any
    observation: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """`done`: nothing is observed any more. `correct`: for accuracy; None: an episode is that ends with a
    reward above 0."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    correct: bool | None = None


class Environment(Protocol):
    """Vectorised; one for all episodes of a process. What it raises drops the samples whose episodes raise it."""

    def reset(self, tasks: Sequence[Task]) -> Sequence[Start]: ...

    def step(self, states: Sequence[Any], actions: Sequence[str]) -> Sequence[Step]:
        """One step of each episode; a state is changed in place."""
        ...


class Episode(Protocol):
    """An environment for one episode alone."""

    def reset(self, task: Task) -> str: ...

    def step(self, action: str) -> Step: ...


class OneByOne:
    """An `Environment` of `Episode`s, stepped one after the other."""

    def __init__(self, make: Callable[[], Episode]) -> None:
        self._make = make

    def reset(self, tasks: Sequence[Task]) -> list[Start]:
        return [self._started(task) for task in tasks]

    def step(self, states: Sequence[Episode], actions: Sequence[str]) -> list[Step]:
        return [state.step(action) for state, action in zip(states, actions, strict=True)]

    def _started(self, task: Task) -> Start:
        episode = self._make()
        return Start(episode, episode.reset(task))
