"""Requests to engines: wait for a slot, send, and try again elsewhere where an engine failed, or is the slow one.

Flows in: `GenerateRequest`s of the scheduler and the evaluation, many at once. Flows out: a `Completion` for each, or
`GenerationFailed` with its reason.
Invariants: a request is under way only with a reservation of the router, and the reservation ends with it, whatever
ends it (answer, failure, cancellation before, while or after the slot was granted); while dispatch is held nothing is
sent; tokens of other versions than the engine was to serve meanwhile are never passed on; no request waits for an
engine that was taken out of service.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slimerl.engine.client import EngineError, EngineUnreachable
from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.engine.routed_experts import RoutedExpertsError, asked_from
from slimerl.resilience.deadline import DeadlineExceeded
from slimerl.rollout.engines import Engines
from slimerl.rollout.lanes import Lanes, Waiter
from slimerl.rollout.live import LiveTokens, Told
from slimerl.rollout.load_figures import LoadFigures
from slimerl.rollout.migration import Migration
from slimerl.rollout.order import LengthOrder, Progress
from slimerl.rollout.routed import with_routing
from slimerl.rollout.router import Query, Reservation, Router
from slimerl.rollout.shared_prompts import SharedPrompts
from slimerl.rollout.suspects import Suspects
from slimerl.rollout.tries import TryFailed, as_failure, check_answer, check_versions, newest_version
from slimerl.rollout.under_way import LOST, UnderWay
from slimerl.samples.messages import EngineState
from slimerl.samples.written_ids import Tokens

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""Engines that one request may fail on before it is given up."""
RETRY_DELAYS_S = (0.1, 0.5)
"""Before the second and third try: an engine that has just restarted or shed load gets a moment."""
GRANTED_AT_ONCE = 32
"""Slots; thousands may come free in one moment, after a weight update, and each request that goes out takes its time:
between so many of them the event loop does what else there is to do."""
_NAMED = 8
"""Requests that an error names at most."""


class GenerateRequest(msgspec.Struct, frozen=True):
    request_id: str
    group: str
    tokens: Tokens
    params: SamplingParams
    session: str = ""
    """Of the requests that go on from each other's tokens; default: of this one alone."""
    expected_new_tokens: int = 0
    """Where there is no progress that tells more; 0: as many as it may have."""
    progress: Progress | None = None
    """Of the sample that it is for, by which the order of those that wait is made. Whoever gives it goes on from what
    an aborted request has: it may be taken back from its engine."""
    told: Told | None = None
    """Reads along; what comes of the request begins with what was told."""
    routing_from: int | None = None
    """Ask which experts were chosen for the tokens from this place on; None: it is not asked."""


class Completion(msgspec.Struct, frozen=True):
    generation: Generation
    engine_id: str
    tries: int


class GenerationFailed(RuntimeError):
    """No engine generated this. `reason`: one word, for counting."""

    def __init__(self, request_id: str, reason: str, detail: str) -> None:
        super().__init__(f"{request_id}: {reason}: {detail}")
        self.reason = reason


class _TakenBack(Exception):
    """It is to be tried on another engine, through no fault of this one."""


class _NotSent(Exception):
    """A weight update began, or ended, before it was sent: it waits for a slot again."""


@dataclass
class Dispatcher:
    """`changed` is called whenever a slot came free or an engine changed its state."""

    router: Router
    engines: Engines
    request_s: float
    changed: Callable[[], None] = lambda: None
    order: LengthOrder[Waiter] = field(default_factory=LengthOrder)
    """Of those that are not urgent."""
    distrusted: Callable[[str], None] = lambda engine_id: None
    """Told of an engine that is quarantined for what it answered."""
    process: str = ""
    """In the names of requests, where engines may still have some of an earlier process."""
    in_flight: int = 0
    """Slots taken and not yet given back."""
    _held: bool = False
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _sent: int = 0
    _lanes: Lanes = field(init=False)
    _suspects: Suspects = field(init=False)
    _under_way: UnderWay = field(default_factory=UnderWay)
    _granting: asyncio.Handle | None = None
    """Of the rest that `_grant` has left."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _figures: LoadFigures = field(default_factory=LoadFigures)
    _prompts: SharedPrompts = field(default_factory=SharedPrompts)
    _migration: Migration = field(init=False)

    def __post_init__(self) -> None:
        self._lanes = Lanes(self.order)
        self._suspects = Suspects(self.router, self.engines, self._taken_for_dead)
        self._migration = Migration(self.router, self.engines, lambda: not (self._held or len(self._lanes)))

    def take_figures(self) -> dict[str, float]:
        """`rollout/…` figures of engines, moves and failed tries since the last call."""
        figures = self._figures.take(self.router.moves, self._migration.moved)
        return figures | {"rollout/engines": float(len(self.router.serving()))}

    async def generate(
        self, request: GenerateRequest, started: Callable[[], None] = lambda: None, urgent: bool = False
    ) -> Completion:
        """Generate, on the engine that the router names.

        Args:
            started: called once, when the request is first sent.
            urgent: goes before all that are not.

        Raises:
            GenerationFailed: every try failed, or the request itself is refused.
        """
        avoid: frozenset[str] = frozenset()
        session = request.session or request.request_id
        expected = request.expected_new_tokens or request.params.max_new_tokens
        failures, lost = 0, 0
        sent, live = False, self._live(request)
        while True:
            query = Query(session, request.group, request.tokens, expected, avoid)
            slot = self._slot_at_once(query, request) or await self._acquire(query, request, urgent)
            generation: Generation | None = None
            try:
                if not sent:
                    started()
                    sent = True
                if request.group:
                    await self._share_prompt(slot, request)
                generation = await self._try(slot, request, live)
                whole = live.whole(generation) if live is not None else generation
                return Completion(whole, slot.engine_id, failures + lost + 1)
            except _NotSent:
                continue
            except _TakenBack:
                logger.info("%s waited on %s for want of KV, and goes to another", request.request_id, slot.engine_id)
            except TryFailed as failure:
                # a lost engine says nothing of the request: one in service is waited for
                by_request = failure.reason != LOST
                failures, lost = failures + by_request, lost + (not by_request)
                if not failure.again or failures == MAX_TRIES:
                    raise GenerationFailed(request.request_id, failure.reason, str(failure)) from failure
                self._figures.tried_again(failure.reason)
                logger.warning("%s failed on %s, tried again: %s", request.request_id, slot.engine_id, failure)
                request = live.rest(request) if live is not None else request
                if not by_request:
                    continue
            finally:
                self._release(slot, generation)
            avoid |= {slot.engine_id}
            if failures:
                await asyncio.sleep(RETRY_DELAYS_S[failures - 1])

    def refresh(self) -> None:
        """Engines joined or changed: grant what can be granted."""
        self._grant()
        self.changed()

    def hold(self) -> None:
        """Send nothing more. What is under way goes on, or waits in its engine."""
        self._held = True
        self._resumed.clear()

    async def drain(self, deadline_s: float) -> None:
        """Send nothing more, and wait until nothing is under way.

        Raises:
            DeadlineExceeded: naming the requests that did not end; dispatch goes on then.
        """
        self.hold()
        try:
            async with asyncio.timeout(deadline_s):
                while self.in_flight:
                    self._idle.clear()
                    await self._idle.wait()
        except BaseException as error:
            named = ", ".join(f"{one.session} on {one.engine_id}" for one in self.router.running()[:_NAMED])
            count = self.in_flight
            self.resume()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"waited {deadline_s:g} s for {count} requests to end before a weight update: {named}"
                ) from None
            raise

    def resume(self) -> None:
        """End a hold."""
        self._held = False
        self._resumed.set()
        self.refresh()

    @property
    def held(self) -> bool:
        return self._held

    def interrupt(self, engine_id: str) -> None:
        """The engine will not go on with what it has: its requests are tried elsewhere."""
        self._under_way.interrupt(engine_id)

    def _taken_for_dead(self, engine_id: str) -> None:
        self.interrupt(engine_id)
        self.refresh()

    async def close(self) -> None:
        if self._granting is not None:
            self._granting.cancel()
        await asyncio.gather(self._suspects.close(), self._migration.close(), return_exceptions=True)

    # --- slots

    def _slot_at_once(self, query: Query, request: GenerateRequest) -> Reservation | None:
        """Where nobody waits, and there is nothing to be put in order."""
        at_once = request.progress is None and not (self._held or self._granting or len(self._lanes))
        engine_id = self.router.route(query) if at_once else None
        return None if engine_id is None else self._taken(engine_id, query)

    async def _acquire(self, query: Query, request: GenerateRequest, urgent: bool) -> Reservation:
        waiter = Waiter(query, asyncio.Future(), request.progress, request.params.max_new_tokens)
        self._lanes.add(waiter, urgent)
        self._grant()
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            # Cancelled between the grant and its arrival here: the slot is this request's to give back.
            if waiter.slot.done() and not waiter.slot.cancelled():
                self._release(waiter.slot.result())
            else:
                self._lanes.remove(waiter)
            raise

    def _grant(self) -> None:
        """Slots for those who wait."""
        if self._held or self._granting is not None or not len(self._lanes):
            return
        if self._lanes.hand_out(self._granted, GRANTED_AT_ONCE):
            self._granting = asyncio.get_running_loop().call_soon(self._grant_rest)

    def _grant_rest(self) -> None:
        self._granting = None
        self.refresh()

    def _granted(self, waiter: Waiter) -> bool:
        """It has a slot now, or wants none any more."""
        if waiter.slot.done():
            return True
        if waiter.progress is not None:
            # more may be known than when it began to wait
            expected = self.order.lengths.expected(waiter.progress.prompt_id, waiter.progress.done, waiter.budget)
            if expected != waiter.query.expected_new_tokens:
                waiter.query = msgspec.structs.replace(waiter.query, expected_new_tokens=expected)
        engine_id = self.router.route(waiter.query)
        if engine_id is None:
            return False
        waiter.slot.set_result(self._taken(engine_id, waiter.query))
        return True

    def _taken(self, engine_id: str, query: Query) -> Reservation:
        slot = self.router.reserve(engine_id, query)
        self._prompts.join(slot, self.router.version, query)
        self.in_flight += 1
        self._figures.taken(engine_id)
        return slot

    def _release(self, slot: Reservation, answer: Generation | None = None) -> None:
        self.router.end(slot, len(answer.tokens) if answer is not None else 0)
        self._prompts.leave(slot, answer)
        self.in_flight -= 1
        self._figures.given_back(slot.engine_id, self.router.serving())
        if not self.in_flight:
            self._idle.set()
        self.refresh()
        self._migration.even_out_soon()

    # --- one try

    async def _share_prompt(self, slot: Reservation, request: GenerateRequest) -> None:
        """Siblings that go to an engine together wait until one of them has had their prompt computed there."""
        version = self.router.version
        await self._prompts.computed(slot, lambda: self._compute_prompt(slot.engine_id, request))
        if self.router.version != version:
            raise _NotSent

    async def _compute_prompt(self, engine_id: str, request: GenerateRequest) -> None:
        nothing = SamplingParams(max_new_tokens=0, temperature=0.0)
        alone = msgspec.structs.replace(request, params=nothing, routing_from=None)
        try:
            await self._under_way.unless_lost(engine_id, self._ask(engine_id, alone, self._new_name(request), None))
        except TryFailed as failure:
            if failure.suspect:
                self._suspects.failed(engine_id)
            raise

    async def _try(self, slot: Reservation, request: GenerateRequest, live: LiveTokens | None) -> Generation:
        version = self.router.version
        name = self._new_name(request)
        asked = self._migration.sent(slot, name, divisible=request.progress is not None)
        if live is not None:
            live.begin(version)
        try:
            asking = self._ask(slot.engine_id, request, name, live)
            generation = await self._under_way.unless_lost(slot.engine_id, asking)
            if newest_version(generation) > version:
                await self._until_proven(generation, slot.engine_id)
            may_end = self._held or asked.taken_back
            check_answer(generation, range(version, self.router.version + 1), request.params, may_end)
        except TryFailed as failure:
            if failure.suspect:
                self._suspects.failed(slot.engine_id)
            if failure.reason == "wrong_version":
                logger.error("engine %s is quarantined: %s", slot.engine_id, failure)
                self.router.quarantine(slot.engine_id, str(failure))
                self.distrusted(slot.engine_id)
            ended = live.ended(request.params) if live is not None and failure.again else None
            if ended is None:
                raise
            return ended
        finally:
            self._migration.ended(slot)
        self._suspects.answered(slot.engine_id)
        if self._migration.waited(slot, asked, generation):
            raise _TakenBack
        return generation

    def _new_name(self, request: GenerateRequest) -> str:
        """Never that of an earlier try, which an engine may still know."""
        self._sent += 1
        return f"{request.request_id}#{self.process}{self._sent}"

    def _live(self, request: GenerateRequest) -> LiveTokens | None:
        return request.told and LiveTokens(
            request.told,
            lambda new: not self._is_ahead(new),
            lambda new, since: check_versions(new, range(since, self.router.version + 1)),
        )

    def _is_ahead(self, generation: Generation) -> bool:
        """Was it sampled with new weights that are not proven yet? Engines go on a moment before that is known here."""
        return self._held and newest_version(generation) > self.router.version

    async def _until_proven(self, generation: Generation, engine_id: str) -> None:
        """Of a newer version than was served when the try began."""
        if self._is_ahead(generation):
            with suppress(TimeoutError):
                async with asyncio.timeout(self.request_s):
                    await self._resumed.wait()
        # also where the update has ended, perhaps without this engine, between the answer and here
        self._check_in_service(engine_id, "did not get its new weights")

    def _check_in_service(self, engine_id: str, otherwise: str) -> None:
        if not (engine_id in self.router.serving() or self.router.engine(engine_id).state is EngineState.DRAINING):
            raise TryFailed(LOST, f"engine {engine_id} {otherwise}", again=True, suspect=False)

    async def _ask(self, engine_id: str, request: GenerateRequest, name: str, live: LiveTokens | None) -> Generation:
        if self._held:
            raise _NotSent
        self._check_in_service(engine_id, "was taken out of service meanwhile")
        # SGLang finds cached prefixes under the same key alone: never what older weights computed
        extra: dict[str, Any] = {"extra_key": f"version {self.router.version}"}
        if request.routing_from is not None:
            extra |= asked_from(request.routing_from)
        streamed = {} if live is None else {"told": live.take}
        try:
            generation = await self.engines[engine_id].generate(
                request.tokens, request.params, request_id=name, timeout_s=self.request_s, extra=extra, **streamed
            )
            if request.routing_from is None:
                return generation
            return await with_routing(generation, request.routing_from, len(request.tokens))
        except (EngineError, RoutedExpertsError) as error:
            if isinstance(error, EngineUnreachable):
                await self._suspects.given_time(engine_id)
            raise as_failure(error) from error
