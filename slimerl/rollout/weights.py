"""Holds: the time in which the trainer may rewrite the engines' weights. A lease, so that no trainer's end hangs us.

Flows in: `HoldRequest`, `ReleaseRequest`. Flows out: the engines to write to; then the new version in service.

State machine: idle → (draining: running requests end) → held (nothing is dispatched; leased) → idle. Requests that
still run in a hold wait in their engine, and go on with the new weights. A lease that is not released
in time ends by itself: an engine that says it holds the lease's version has been verified and committed, and is
released; of every other nobody knows what was written, and it is quarantined until a later full, verified rewrite.

Engines of evaluations alone (`evaluation_engines.py`) are held for a version that is evaluated, and not while they
evaluate another.

All of it is journaled (`samples/served.py`). A lease ends with its process: in one that takes over, engines serve at
once that nobody may have written to since their release, and the others after the next one.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slimerl.engine.client import EngineError
from slimerl.engine.protocol import PauseMode
from slimerl.resilience.deadline import Deadline
from slimerl.rollout.dispatch import Dispatcher
from slimerl.rollout.engines import Engines
from slimerl.rollout.evaluation_engines import EnginePools, EvaluationEngines
from slimerl.rollout.returning import ReturningEngines
from slimerl.samples.messages import EngineInfo, EngineState, HoldReply, HoldRequest, ReleaseRequest
from slimerl.samples.served import ServedWeights
from slimerl.telemetry import trace

logger = logging.getLogger(__name__)

PROBE_S = 5.0
"""For one engine to say which version it holds, when a lease has run out."""


class HoldError(RuntimeError):
    """The hold or release does not fit the present state; the message says what holds."""


@dataclass(frozen=True, slots=True)
class _Lease:
    lease_id: str
    version: int
    engines: tuple[EngineInfo, ...]
    granted_s: float
    of: tuple[Dispatcher, ...]
    """By whom the engines are asked."""


@dataclass
class WeightHold:
    """
    Args of the constructor:
        engines_expected: the first hold waits for so many to register, up to `start_s` or the lease's seconds.
        on_update: `rollout.on_update` of the spec.
        returning: engines that are being started again; a hold for which no other is left waits for them.
        released: called with the version that engines serve from now on.
        evaluators: engines that do nothing but evaluate; the hold does without them where it must.
    """

    dispatcher: Dispatcher
    engines: Engines
    engines_expected: int
    start_s: float
    on_update: Literal["retract", "in_place", "abort", "drain"] = "retract"
    released: Callable[[int], None] = lambda version: None
    returning: ReturningEngines = field(default_factory=ReturningEngines)
    served: ServedWeights = field(default_factory=ServedWeights)
    evaluators: EvaluationEngines | None = None
    _busy: str = ""
    """What is going on, for those who must be refused."""
    _lease: _Lease | None = None
    _expiry: "asyncio.Task[None] | None" = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def hold(self, request: HoldRequest) -> HoldReply:
        """Stop dispatching and, where it is to drain, wait until no request runs; the lease begins then.

        Raises:
            HoldError: another hold is under way, the version is older than the present one, or no engine is left.
            DeadlineExceeded: engines did not register, or requests did not end, within `lease_s`.
        """
        router = self.dispatcher.router
        if self._busy:
            raise HoldError(f"weights are held already: {self._busy}")
        if request.version < router.version:
            raise HoldError(f"version {request.version} is older than version {router.version}, which engines serve")
        self._busy = f"draining for version {request.version}"
        begun = time.monotonic()
        try:
            if router.version < 0:
                within_s = min(self.start_s, request.lease_s)
                await self._registered(self.engines_expected, within_s, self.pools.dispatchers())
            else:
                await self._outlived_registered(request.lease_s)
                wait_s = min(self.returning.remaining_s, request.lease_s)
                if wait_s and not _alive([self.dispatcher]):
                    await self._registered(1, wait_s, [self.dispatcher])
            if self.on_update == "drain":
                await self.dispatcher.drain(request.lease_s)
            else:
                self.dispatcher.hold()
        except BaseException:
            self._busy = ""
            raise
        if not _alive([self.dispatcher]):
            self._end()
            raise HoldError(f"no engine is left to hold: {router.reasons() or 'none has registered'}")
        taking = tuple(self.pools.taking(request.version))
        for dispatcher in taking:
            dispatcher.hold()
        engines = tuple(_alive(taking))
        lease = _Lease(uuid.uuid4().hex, request.version, engines, time.monotonic(), taking)
        self._lease = lease
        self.served.held([one.engine_id for one in engines])
        trace.add("drain", begun, lease.granted_s, "weights", request.version)
        self._busy = f"lease {lease.lease_id} for version {lease.version}"
        self._expiry = asyncio.get_running_loop().create_task(self._expire(lease, request.lease_s))
        logger.info("weights held for version %d: %s", lease.version, ", ".join(one.engine_id for one in engines))
        pause = PauseMode.RETRACT if self.on_update == "drain" else PauseMode(self.on_update)
        return HoldReply(lease.lease_id, list(engines), pause)

    def release(self, request: ReleaseRequest) -> None:
        """End a hold: `whole` engines serve the version; dispatch goes on. Asked again nothing is changed.

        Raises:
            HoldError: the lease is not the present one (it may have run out), or names another version.
            RouterError: an unknown engine.
        """
        lease = self._lease
        if lease is None and self.served.is_ended(request.lease_id, request.version):
            return
        if lease is None or lease.lease_id != request.lease_id:
            raise HoldError(
                f"lease {request.lease_id} is not held; it may have run out "
                f"({'nothing is held' if not self._busy else self._busy}); hold again and rewrite the engines"
            )
        if request.version != lease.version:
            raise HoldError(f"lease {lease.lease_id} is for version {lease.version}, not {request.version}")
        held = {one.engine_id for one in lease.engines}
        unnamed = held - set(request.whole) - set(request.dirty)
        dirty = {**request.dirty, **dict.fromkeys(unnamed, "the release said nothing of it")}
        # another server, which took the place of one that was held, has been written nothing, right or wrong
        new = held - {one.engine_id for one in self._same_servers(lease)}
        whole = [name for name in request.whole if name not in new]
        dirty = {name: reason for name, reason in dirty.items() if name not in new}
        self.pools.release(lease.of, request.version, whole, dirty)
        self._note_release(lease.lease_id, lease.version)
        for engine_id, reason in dirty.items():
            logger.error("engine %s is quarantined: %s", engine_id, reason)
            self.pools.of(engine_id).interrupt(engine_id)
        now = time.monotonic()
        trace.add("hold", lease.granted_s, now, "weights", request.version)
        logger.info("version %d released after %.2f s", request.version, now - lease.granted_s)
        if self._expiry is not None:
            self._expiry.cancel()
        self._end()
        self.released(request.version)

    @property
    def busy(self) -> str:
        """What is going on; empty while nothing is held."""
        return self._busy

    @property
    def pools(self) -> EnginePools:
        return EnginePools(self.dispatcher, self.evaluators)

    def joined(self, engine: EngineInfo) -> None:
        """An engine registered, as it says of itself."""
        if self.served.proves(engine):
            logger.info("engine %s has the weights that were proven, and serves", engine.engine_id)
            dispatcher = self.pools.of(engine.engine_id)
            dispatcher.router.release(engine.version, [engine.engine_id], {})
            dispatcher.refresh()
        self._changed.set()

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)

    def _same_servers(self, lease: _Lease) -> list[EngineInfo]:
        """Of the engines that were held those in whose place no other has registered since."""
        now = {one.engine_id: (one.url, one.admin_key) for one in self.pools.engines()}
        return [one for one in lease.engines if now.get(one.engine_id) == (one.url, one.admin_key)]

    async def _registered(self, count: int, within_s: float, of: Sequence[Dispatcher]) -> None:
        """So many: of the first version all at once, for before it nothing could be served anyway."""
        deadline = Deadline(f"{count} engine{'s'[: count > 1]} to register", within_s)
        while len(alive := _alive(of)) < count:
            names = ", ".join(one.engine_id for one in alive)
            deadline.check(f"registered: {names or 'none'}; see the logs of the missing engines")
            self._changed.clear()
            # The deadline is looked at again when nobody comes.
            await _wait(self._changed, deadline.remaining_s)

    async def _outlived_registered(self, within_s: float) -> None:
        """Those that outlived the process before are all taken along: one that came later would need a sync of its
        own."""
        deadline = Deadline("the engines to register again", within_s)
        while left_s := min(self.returning.at_once_s, deadline.remaining_s):
            self._changed.clear()
            await _wait(self._changed, left_s)

    async def _expire(self, lease: _Lease, lease_s: float) -> None:
        await asyncio.sleep(lease_s)
        self._lease = None
        self._busy = f"lease {lease.lease_id} ran out after {lease_s:g} s; looking at its engines"
        logger.error("%s; the trainer did not release it", self._busy)
        asked = self._same_servers(lease)
        found = await asyncio.gather(*(self._committed(one, lease.version) for one in asked))
        same = self._same_servers(lease)
        whole = [one.engine_id for one, committed in zip(asked, found, strict=True) if committed and one in same]
        if not any(self.pools.of(engine_id) is self.dispatcher for engine_id in whole):
            whole = []  # what evaluates alone does not make it the run's version
        reason = f"its weight update to version {lease.version} was never confirmed (the lease ran out)"
        for engine in same:
            owner = self.pools.of(engine.engine_id)
            if engine.engine_id not in whole and owner.router.engine(engine.engine_id).state is not EngineState.DEAD:
                logger.error("engine %s is quarantined: %s", engine.engine_id, reason)
                owner.router.quarantine(engine.engine_id, reason)
                owner.interrupt(engine.engine_id)
        if whole:
            logger.warning("released at version %d although the lease ran out: %s", lease.version, ", ".join(whole))
            self.pools.release(lease.of, lease.version, whole, {})
            self._note_release("", lease.version)
        self._end()
        if whole:
            self.released(lease.version)

    async def _committed(self, engine: EngineInfo, version: int) -> bool:
        """Does it hold the lease's version for certain? Then it is let go on, too."""
        if engine.version == version:
            return False  # It said so before the lease already, which proves nothing about the rewrite.
        client = self.engines[engine.engine_id]
        try:
            if await client.weight_version(timeout_s=PROBE_S) != version:
                return False
            await client.continue_generation(timeout_s=PROBE_S)
        except (EngineError, ValueError):
            return False
        return True

    def _note_release(self, lease_id: str, version: int) -> None:
        """Before anything is sent to the engines."""
        self.served.released(lease_id, version, {one.engine_id: one.admin_key for one in self.pools.serving(version)})

    def _end(self) -> None:
        self._lease = None
        self._expiry = None
        self._busy = ""
        for dispatcher in self.pools.dispatchers():
            dispatcher.resume()


def _alive(of: Iterable[Dispatcher]) -> list[EngineInfo]:
    engines = [engine for dispatcher in of for engine in dispatcher.router.engines()]
    return [one for one in engines if one.state is not EngineState.DEAD]


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
