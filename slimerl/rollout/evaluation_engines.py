"""Engines that evaluate and do nothing else (`evaluation.engines`), beside those of the rollouts.

Flows in: engines by name, versions, releases. Flows out: the dispatcher that an engine is asked by, the engines that a
hold takes, releases to whom they concern.
Invariants: each kind has a dispatcher and a router of its own, so that no request goes to an engine of the other kind;
engines that evaluate are never written to, and the version that they serve is the one that is evaluated.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from slimerl.rollout.dispatch import Dispatcher
from slimerl.samples.messages import EngineInfo, EngineState


@dataclass
class EvaluationEngines:
    """
    Args of the constructor:
        engine_ids: which they are, registered or not.
        dispatcher: of them alone.
        is_due: is a version evaluated?
        is_evaluating: does an evaluation run?
    """

    engine_ids: frozenset[str]
    dispatcher: Dispatcher
    is_due: Callable[[int], bool]
    is_evaluating: Callable[[], bool] = lambda: False

    def take(self, version: int) -> bool:
        """Do they get these weights? Others would only be replaced before anybody asks for them."""
        return self.is_due(version) and not self.is_evaluating()

    def serve(self, version: int) -> bool:
        """Does one of them?"""
        return self.dispatcher.router.version == version and bool(self.dispatcher.router.serving())

    def unsynced(self) -> list[str]:
        """While none serves what is wanted: those that do once they have got it."""
        engines = self.dispatcher.router.engines()
        return [one.engine_id for one in engines if one.state not in (EngineState.DIRTY, EngineState.DEAD)]

    def all_dirty(self) -> bool:
        """Did each refuse its weights? Then the next ones will hardly fare better, unlike an engine that ended."""
        states = {one.engine_id: one.state for one in self.dispatcher.router.engines()}
        return all(states.get(engine_id) is EngineState.DIRTY for engine_id in self.engine_ids)

    def reasons(self) -> str:
        """Why each is out of service."""
        reasons = self.dispatcher.router.reasons()
        return "; ".join(f"{name}: {reasons.get(name, 'it has no weights yet')}" for name in sorted(self.engine_ids))


@dataclass(frozen=True)
class EnginePools:
    """All engines of a run. `evaluators`: None: those of the rollouts evaluate, too."""

    rollouts: Dispatcher
    evaluators: EvaluationEngines | None = None

    def of(self, engine_id: str) -> Dispatcher:
        """By which an engine is asked."""
        if self.evaluators is not None and engine_id in self.evaluators.engine_ids:
            return self.evaluators.dispatcher
        return self.rollouts

    def dispatchers(self) -> list[Dispatcher]:
        return [self.rollouts, *([] if self.evaluators is None else [self.evaluators.dispatcher])]

    def engines(self) -> list[EngineInfo]:
        return [engine for dispatcher in self.dispatchers() for engine in dispatcher.router.engines()]

    def engine(self, engine_id: str) -> EngineInfo:
        """Raises RouterError: it is unknown."""
        return self.of(engine_id).router.engine(engine_id)

    def serving(self, version: int) -> list[EngineInfo]:
        """Those that serve the version."""
        return [one for one in self.engines() if one.state is EngineState.SERVING and one.version == version]

    def taking(self, version: int) -> list[Dispatcher]:
        """Whose engines get these weights."""
        with_them = self.evaluators is not None and self.evaluators.take(version)
        return self.dispatchers() if with_them else [self.rollouts]

    def release(
        self, taking: Iterable[Dispatcher], version: int, whole: Iterable[str], dirty: Mapping[str, str]
    ) -> None:
        """As `Router.release`, to each of `taking` what is of its engines. Raises RouterError: an unknown engine, or
        an older version."""
        whole = list(whole)
        for engine_id in (*whole, *dirty):
            self.engine(engine_id)
        for dispatcher in taking:
            own = [engine_id for engine_id in whole if self.of(engine_id) is dispatcher]
            torn = {engine_id: reason for engine_id, reason in dirty.items() if self.of(engine_id) is dispatcher}
            dispatcher.router.release(version, own, torn)
