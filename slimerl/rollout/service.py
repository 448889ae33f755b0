"""The control service: the rollout role over HTTP, as `slimerl.samples.messages` describes it.

Flows in: msgpack messages of trainers and engines, each with the token header. Flows out: msgpack messages, or a
`Refusal` with a status: 400 not such a message, 401 token, 404 unknown sample or path, 409 it does not fit the
present state, 503 it can not succeed (no engine left, run stopped, shutting down), 504 its deadline passed.
This module translates; what is decided is decided in the parts it holds.
"""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from aiohttp import web

from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.rollout.admission import GateError
from slimerl.rollout.engines import EngineClients
from slimerl.rollout.evaluation import Evaluation, EvaluationError
from slimerl.rollout.evaluations import Evaluations
from slimerl.rollout.full_collections import collect_soon
from slimerl.rollout.loop_lag import LoopLag
from slimerl.rollout.returning import ReturningEngines
from slimerl.rollout.router import Router, RouterError
from slimerl.rollout.scheduler import RolloutStopped, Scheduler
from slimerl.rollout.speculation.dispatcher import Speculation
from slimerl.rollout.speculation.engine_drafts import EngineDrafts
from slimerl.rollout.weights import HoldError, WeightHold
from slimerl.samples.messages import (
    TOKEN_HEADER,
    BatchManifest,
    BatchTrained,
    EngineInfo,
    EngineLost,
    EngineState,
    EvaluateReply,
    EvaluateRequest,
    FetchRequest,
    HoldRequest,
    NextBatchRequest,
    Path,
    Refusal,
    ReleaseRequest,
    RolloutState,
    Status,
    SyncWanted,
    decode,
    encode,
)
from slimerl.samples.rows import DataError
from slimerl.samples.sample import SampleState
from slimerl.samples.store import StoreError

logger = logging.getLogger(__name__)

MAX_FETCH_BYTES = 32 * 2**20
"""Of payload in one answer: packing it holds up the event loop, and both sides have it twice."""
_JOURNALED = frozenset({Path.NEXT_BATCH, Path.BATCH_TRAINED, Path.HOLD, Path.RELEASE, Path.RESTORE})
"""What is told by their answers a process that takes over knows."""

Message = TypeVar("Message")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS_OF_ERROR: tuple[tuple[type[Exception], int], ...] = (
    (msgspec.MsgspecError, 400),
    (StoreError, 409),
    (DataError, 409),
    (RouterError, 409),
    (GateError, 409),
    (HoldError, 409),
    (EvaluationError, 409),
    (RolloutStopped, 503),
    (DeadlineExceeded, 504),
)


class NoEngine(RolloutStopped):
    """No engine serves, and without a weight sync none will."""


@dataclass
class ControlService:
    """Wires the parts together and answers for them."""

    token: str
    router: Router
    clients: EngineClients
    scheduler: Scheduler
    weights: WeightHold
    evaluation: Evaluation
    lag: LoopLag
    speculation: Speculation | EngineDrafts | None = None
    returning: ReturningEngines = field(default_factory=ReturningEngines)
    shutdown: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the role is to end."""
    begins_anew: bool = False
    """It is to serve again then, as one that has just started."""
    figures: Callable[[], dict[str, float]] = dict
    """What else there is to tell with a batch."""
    _progress: asyncio.Event = field(default_factory=asyncio.Event)
    _evaluations: Evaluations = field(init=False)

    def __post_init__(self) -> None:
        self._evaluations = Evaluations(
            *(lambda: self.evaluation, self._progress, lambda: self.router.version),
            *(self._serving, self._unsynced, self.weights.evaluators),
        )
        if (evaluators := self.weights.evaluators) is not None:
            evaluators.is_evaluating = self._evaluations.running
            evaluators.dispatcher.changed = self._progressed
            evaluators.dispatcher.distrusted = self.scheduler.served.distrusted
        self.scheduler.progressed = self._progressed
        self.scheduler.dispatcher.changed = self._engines_changed
        self.weights.released = self._released
        self.weights.returning = self.returning
        self.weights.served = self.scheduler.served
        self.scheduler.dispatcher.distrusted = self.scheduler.served.distrusted

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=0)  # a state has all that is buffered
        application.add_routes(
            [
                web.get(Path.HEALTH, self._health),
                web.get(Path.STATUS, self._status),
                web.get(Path.ENGINES, self._engines),
                web.post(Path.REGISTER_ENGINE, self._register),
                web.post(Path.ENGINE_LOST, self._lost),
                web.post(Path.HOLD, self._hold),
                web.post(Path.RELEASE, self._release),
                web.post(Path.NEXT_BATCH, self._next_batch),
                web.post(Path.BATCH_TRAINED, self._trained),
                web.post(Path.FETCH_SAMPLES, self._fetch),
                web.post(Path.EVALUATE, self._evaluate),
                web.post(Path.BEGIN_EVALUATION, self._begin_evaluation),
                web.get(Path.STATE, self._state),
                web.post(Path.RESTORE, self._restore),
                web.post(Path.BEGIN_ANEW, self._begin_anew),
                web.post(Path.SHUTDOWN, self._shutdown),
            ]
        )
        return application

    def status(self) -> Status:
        counts = self.scheduler.store.counts()
        return Status(
            version=self.router.version,
            admitted=counts.admitted,
            running=counts.running,
            buffered=counts.buffered,
            trained=counts.trained,
            dropped=counts.dropped,
            engines=self.weights.pools.engines(),
            returning=self.returning.names(),
            evaluating=self._evaluations.pending(),
        )

    def stop(self) -> None:
        """Begin to end: whoever waits is refused."""
        self.shutdown.set()
        self._evaluations.cancel()
        self._progressed()

    # --- what the parts say to each other

    def _progressed(self) -> None:
        self._progress.set()

    def _engines_changed(self) -> None:
        self.scheduler.wake()
        self._progressed()

    def _released(self, version: int) -> None:
        self.scheduler.advance(version)
        self._progressed()

    # --- handlers

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _status(self, _: web.Request) -> web.Response:
        return _answer(self.status())

    async def _engines(self, _: web.Request) -> web.Response:
        return _answer(self.weights.pools.engines())

    async def _register(self, request: web.Request) -> web.Response:
        return _answer(self.register(await _message(request, EngineInfo)))

    def register(self, engine: EngineInfo) -> EngineInfo:
        """The engine as it is kept: JOINING, or as before where its first answer was lost."""
        pools = self.weights.pools
        if self._is_known(engine):
            return pools.engine(engine.engine_id)
        self.clients.add(engine)
        pools.of(engine.engine_id).router.join(engine)
        self.returning.registered(engine.engine_id)
        logger.info("engine %s registered at %s", engine.engine_id, engine.url)
        self.weights.joined(engine)
        self._progressed()
        return pools.engine(engine.engine_id)

    def _is_known(self, engine: EngineInfo) -> bool:
        """Is it this very server that has registered before? The key is new with every start of a server."""
        return any(
            (known.engine_id, known.url, known.admin_key) == (engine.engine_id, engine.url, engine.admin_key)
            and known.state is not EngineState.DEAD
            for known in self.weights.pools.engines()
        )

    async def _lost(self, request: web.Request) -> web.Response:
        return _answer(self.lost(await _message(request, EngineLost)))

    def lost(self, lost: EngineLost) -> EngineInfo:
        """Nothing waits for it any more but for its return; the engine as it was. Raises RouterError: unknown."""
        engine, dispatcher = self.weights.pools.engine(lost.engine_id), self.weights.pools.of(lost.engine_id)
        logger.error("engine %s has ended: %s", lost.engine_id, lost.reason)
        self.returning.lost(lost.engine_id, lost.returns_s)
        if not lost.returns_s:
            self.scheduler.served.distrusted(lost.engine_id)
        dispatcher.router.leave(lost.engine_id, lost.reason)
        dispatcher.interrupt(lost.engine_id)
        dispatcher.refresh()
        return engine

    async def _hold(self, request: web.Request) -> web.Response:
        reply = await self.weights.hold(await _message(request, HoldRequest))
        collect_soon()
        return _answer(reply)

    async def _release(self, request: web.Request) -> web.Response:
        """Answers with the `Status` after it."""
        self.weights.release(await _message(request, ReleaseRequest))
        return _answer(self.status())

    async def _next_batch(self, request: web.Request) -> web.Response:
        return _answer(await self.next_batch(await _message(request, NextBatchRequest)))

    async def next_batch(self, request: NextBatchRequest) -> BatchManifest | SyncWanted:
        """Wait for the batch of a step, or for engines that a weight sync would bring into service.

        Raises:
            DeadlineExceeded, RolloutStopped, StoreError: see the module's docstring.
        """
        deadline = Deadline(f"the batch of step {request.step}", request.timeout_s)
        while True:
            self._progress.clear()
            manifest = self.scheduler.take_batch(request.step)
            if manifest is not None:
                worst_lag_s = self.lag.take_worst_s()
                metrics = {**manifest.metrics, "rollout/event_loop_lag_s": worst_lag_s, **self.figures()}
                if self.speculation is not None:
                    metrics |= self.speculation.take_figures()
                if self.scheduler.journal is not None and self.scheduler.journal.failure:
                    metrics["rollout/journal_failed"] = 1.0
                return msgspec.structs.replace(manifest, metrics=metrics)
            if engines := self._unsynced():
                return SyncWanted(engines)
            self._refuse_hopeless()
            deadline.check(self._what_is_missing())
            try:
                async with asyncio.timeout(deadline.remaining_s):
                    await self._progress.wait()
            except TimeoutError:
                continue

    def _unsynced(self) -> list[str]:
        """Engines that have registered since the last sync."""
        if self.router.version < 0 or self.weights.busy:
            return []
        return [one.engine_id for one in self.router.engines() if one.state is EngineState.JOINING]

    def _refuse_hopeless(self) -> None:
        """Raises NoEngine when nothing will ever answer, instead of waiting for the deadline."""
        if self.shutdown.is_set():
            raise NoEngine("the rollout role is shutting down")
        if self.router.version < 0:
            raise HoldError("no weights have been released yet; sync them before asking for a batch")
        judging = self.scheduler.store.in_state(SampleState.GENERATED)
        # While weights are held the engines may yet come into service.
        coming = self.returning.names() or self.weights.busy
        if not (self._serving() or coming or judging or self.scheduler.dispatcher.in_flight):
            states = "; ".join(
                f"{engine.engine_id} is {engine.state}: {self.router.reasons().get(engine.engine_id, 'awaits a sync')}"
                for engine in self.router.engines()
            )
            raise NoEngine(f"no engine serves version {self.router.version}: {states or 'none has registered'}")

    def _serving(self) -> bool:
        return any(engine.state is EngineState.SERVING for engine in self.router.engines())

    def _what_is_missing(self) -> str:
        store = self.scheduler.store
        ready = sum(group.ready for group in store.unleased())
        running = ", ".join(f"{one.session} on {one.engine_id}" for one in self.router.running()[:4])
        return (
            f"{ready} of {self.scheduler.settings.groups_per_step} groups ready, {len(store.open_groups())} under way; "
            f"requests running: {self.scheduler.dispatcher.in_flight} ({running or 'none'}); "
            f"weights {self.weights.busy or 'not held'}; engines expected back: "
            f"{', '.join(self.returning.names()) or 'none'}"
        )

    async def _trained(self, request: web.Request) -> web.Response:
        """Answers with the `Status` after it."""
        self.scheduler.trained((await _message(request, BatchTrained)).batch_id)
        return _answer(self.status())

    async def _fetch(self, request: web.Request) -> web.Response:
        """Answers with a list of `SamplePayload`, in the order asked for, as many as fit into one answer."""
        wanted = await _message(request, FetchRequest)
        try:
            payloads = self.scheduler.store.payloads(wanted.sample_ids, MAX_FETCH_BYTES)
        except StoreError as error:
            return _refusal(404, str(error))
        return _answer(payloads)

    async def _evaluate(self, request: web.Request) -> web.Response:
        return _answer(await self.evaluate(await _message(request, EvaluateRequest)))

    async def _begin_evaluation(self, request: web.Request) -> web.Response:
        """Answers with the `Status`; asked again it is the same evaluation."""
        self.begin_evaluation(await _message(request, EvaluateRequest))
        return _answer(self.status())

    def begin_evaluation(self, request: EvaluateRequest) -> None:
        """`evaluate` of the same step has the result."""
        self._evaluations.begin(request)

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply | SyncWanted:
        """The evaluation, which may have been begun, or what is needed first. Raises as `Evaluations.result`."""
        return await self._evaluations.result(request)

    async def _state(self, _: web.Request) -> web.Response:
        """Answers with a `RolloutState`."""
        state = self.scheduler.state()
        if self.speculation is not None:
            await self.speculation.save(state.steps)
        return _answer(state)

    async def _restore(self, request: web.Request) -> web.Response:
        """Answers with the `Status` after it."""
        state = await _message(request, RolloutState)
        if self.speculation is not None:
            await self.speculation.restore(state.steps)
        self.scheduler.restore(state)
        return _answer(self.status())

    async def _begin_anew(self, request: web.Request) -> web.Response:
        logger.warning("asked to begin anew, with nothing of what there is")
        self.begins_anew = True
        return await self._shutdown(request)

    async def _shutdown(self, _: web.Request) -> web.Response:
        """Answers with the last `Status`; the role ends then."""
        logger.info("asked to shut down")
        answer = _answer(self.status())
        self.stop()
        return answer

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Token first; then every error becomes a `Refusal`."""
        given = request.headers.get(TOKEN_HEADER, "")
        # headers keep bytes that are no UTF-8 as halves of surrogate pairs
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self.token.encode()):
            return _refusal(401, f"the header {TOKEN_HEADER} is missing or wrong; it stands in the run's address file")
        try:
            answer = await handler(request)
            if request.path in _JOURNALED and self.scheduler.journal is not None:
                await self.scheduler.journal.written()
            return answer
        except web.HTTPException as error:
            return _refusal(error.status, f"{request.method} {request.path}: {error.reason}")
        except Exception as error:  # noqa: BLE001 - the last place where an error can be told to whoever asked
            return _refused(request, error)


def _refused(request: web.Request, error: Exception) -> web.Response:
    for kind, status in _STATUS_OF_ERROR:
        if isinstance(error, kind):
            return _refusal(status, f"{request.path}: {error}")
    logger.error("%s: an unexpected error", request.path, exc_info=error)
    return _refusal(500, f"{request.path}: {type(error).__name__}: {error}; see the log of the rollout role")


def _refusal(status: int, error: str) -> web.Response:
    return web.Response(status=status, body=encode(Refusal(error)), content_type="application/msgpack")


def _answer(message: msgspec.Struct | list) -> web.Response:
    return web.Response(body=encode(message), content_type="application/msgpack")


async def _message(request: web.Request, kind: type[Message]) -> Message:
    return decode(await request.read(), kind)
