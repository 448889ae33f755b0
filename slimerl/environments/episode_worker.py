"""A worker's part of environments: `slimerl.rewards.worker` calls what `scorer` makes.

Flows in: `Advance`s in msgpack, those of many episodes in one call. Flows out: an `Advanced` for each.
Invariants: an episode is where its actions lead: one that is not remembered, or remembered elsewhere, is begun anew and
its actions repeated; no episode goes on from a call that raised; memory is bounded.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slimerl.environments.environment import Environment, Start, Step, Task
from slimerl.environments.made import make_environment

MAX_EPISODES = 4096
"""Under way in one worker; the one that was asked for longest ago is forgotten first, and repeated when it goes on."""


class Advance(msgspec.Struct, frozen=True):
    """Take an episode to where it is after `actions`, all of them from its beginning."""

    episode_id: str
    task: Task
    actions: tuple[str, ...]


class Advanced(msgspec.Struct, frozen=True):
    """`observations`: from the one with number `first` to the last, number 0 before the first action. `rewards`: of
    each action."""

    first: int
    observations: tuple[str, ...]
    rewards: tuple[float, ...]
    done: bool
    correct: bool | None


class NotRepeatable(Exception):
    """The episode has ended before its last action."""


@dataclass
class _Episode:
    state: Any
    observations: list[str]
    actions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    done: bool = False
    correct: bool | None = None


class Episodes:
    """Those of one worker."""

    def __init__(self, environment: Environment, most: int = MAX_EPISODES) -> None:
        self._environment = environment
        self._most = most
        self._known: OrderedDict[str, _Episode] = OrderedDict()

    def advance(self, asked: Sequence[Advance]) -> list[Advanced]:
        """Raises what the environment raises, TypeError or NotRepeatable."""
        # Taken out while they are worked on: whatever raises, none of them is gone on from.
        episodes = [self._take(each) for each in asked]
        first = [len(each.actions) if each is not None else 0 for each in episodes]
        begun = self._begin([each for each, known in zip(asked, episodes, strict=True) if known is None])
        under_way = [each if each is not None else next(begun) for each in episodes]
        while behind := [
            (episode, each.actions[len(episode.actions)])
            for episode, each in zip(under_way, asked, strict=True)
            if len(episode.actions) < len(each.actions)
        ]:
            self._step(behind)
        for each, episode in zip(asked, under_way, strict=True):
            self._keep(each.episode_id, episode)
        return [
            Advanced(start, tuple(one.observations[start:]), tuple(one.rewards), one.done, one.correct)
            for start, one in zip(first, under_way, strict=True)
        ]

    def _take(self, asked: Advance) -> _Episode | None:
        known = self._known.pop(asked.episode_id, None)
        if known is None or known.actions != list(asked.actions[: len(known.actions)]):
            return None
        return known

    def _keep(self, episode_id: str, episode: _Episode) -> None:
        if not episode.done:
            self._known[episode_id] = episode
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def _begin(self, asked: Sequence[Advance]) -> Any:
        started = self._environment.reset([each.task for each in asked]) if asked else []
        _check(started, Start, len(asked), "reset")
        return iter([_Episode(each.state, [each.observation]) for each in started])

    def _step(self, behind: Sequence[tuple[_Episode, str]]) -> None:
        for episode, _ in behind:
            if episode.done:
                raise NotRepeatable(f"an episode ended after {len(episode.actions)} actions, and not as the first time")
        steps = self._environment.step([episode.state for episode, _ in behind], [action for _, action in behind])
        _check(steps, Step, len(behind), "step")
        for (episode, action), step in zip(behind, steps, strict=True):
            episode.actions.append(action)
            episode.observations.append(step.observation)
            episode.rewards.append(float(step.reward))
            episode.done, episode.correct = step.done, step.correct


def scorer(environment: str, options: dict[str, Any]) -> Callable[[bytes], bytes]:
    """Raises CustomFunctionError, MissingExtra, or what making the environment raises."""
    episodes = Episodes(make_environment(environment, options))

    def call(body: bytes) -> bytes:
        return msgspec.msgpack.encode(episodes.advance(msgspec.msgpack.decode(body, type=list[Advance])))

    return call


def _check(given: Any, kind: type, count: int, method: str) -> None:
    if len(given) != count or not all(isinstance(each, kind) for each in given):
        raise TypeError(f"{method} must give one {kind.__name__} for each of {count} episodes, found {given!r:.300}")
