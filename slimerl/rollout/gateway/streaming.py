"""A reply on its way to a client that reads along.

Flows in: an order, the desk's way to fill it. Flows out: events, as tokens come. Invariants: the reply is sampled and
recorded at the engine's pace, not at the client's: what a slow client has not read waits here, and comes in fewer
events; a client that goes, or reads nothing for `STALLED_S`, ends its request.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from slimerl.rollout.gateway.answers import DONE, event
from slimerl.rollout.gateway.desk import Order
from slimerl.rollout.gateway.errors import ApiError, api_error, unforeseen
from slimerl.rollout.gateway.replies import Piece
from slimerl.rollout.gateway.sampler import Told

logger = logging.getLogger(__name__)

STALLED_S = 120.0
STREAM = "text/event-stream"
_HEADERS = {"content-type": STREAM, "cache-control": "no-cache", "x-accel-buffering": "no"}

Fill = Callable[[Order, Told], Awaitable[list[Piece]]]


class BrokenOff(Exception):
    """A stream ended with an error, of which the client was told. `name`: for counting."""

    def __init__(self, stream: web.StreamResponse, name: str) -> None:
        super().__init__(name)
        self.stream = stream
        self.name = name


@dataclass
class _Events:
    """To one client. The stream is opened with the first tokens: what fails before is told by a status."""

    request: web.Request
    stream: web.StreamResponse

    async def write(self, data: bytes) -> None:
        """Raises ConnectionError: the client has gone, or reads nothing."""
        try:
            async with asyncio.timeout(STALLED_S):
                if not self.stream.prepared:
                    await self.stream.prepare(self.request)
                if data:
                    await self.stream.write(data)
        except TimeoutError:
            raise ConnectionError(f"the client has read nothing for {STALLED_S:g} s") from None


async def streamed(request: web.Request, order: Order, fill: Fill) -> web.StreamResponse:
    """Fill an order while the client reads.

    Raises:
        BrokenOff: it failed, after the stream was opened.
        ConnectionError: the client has gone.
        Exception: as `fill`, before the stream was opened.
    """
    events = _Events(request, web.StreamResponse(headers=_HEADERS))
    news = asyncio.Event()
    filling = asyncio.ensure_future(fill(order, news.set))
    filling.add_done_callback(lambda _: news.set())
    try:
        await _tell(order, events, news, filling)
        rest = await filling
    except Exception as error:
        # a stream that is open has no other status any more
        if not events.stream.prepared or isinstance(error, ConnectionError):
            raise
        failure = api_error(error)
        if failure is None:
            logger.error("%s: an unexpected error in a stream", request.path, exc_info=error)
            failure = unforeseen(error)
        await events.write(event(failure.body()))
        raise BrokenOff(events.stream, failure.name) from error
    finally:
        # whatever ended this ends the request, and is over only when that is
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
    answer, shape = order.answer, order.shape
    begun = b"" if events.stream.prepared else shape.begun(answer)
    await events.write(begun + shape.ended(answer, rest) + DONE)
    await events.stream.write_eof()
    return events.stream


async def relayed(request: web.Request, read: Callable[[], Awaitable[bytes]]) -> web.StreamResponse:
    """Pass a stream of another gateway on as it comes.

    Args:
        read: its next bytes; empty at its end. Raises ApiError: it has broken off.

    Raises: as `streamed`.
    """
    events = _Events(request, web.StreamResponse(headers=_HEADERS))
    try:
        while data := await read():
            await events.write(data)
    except ApiError as failure:
        if not events.stream.prepared:
            raise
        await events.write(event(failure.body()))
        raise BrokenOff(events.stream, failure.name) from failure
    await events.write(b"")
    await events.stream.write_eof()
    return events.stream


async def _tell(order: Order, events: _Events, news: asyncio.Event, filling: "asyncio.Future[list[Piece]]") -> None:
    """Until the order is filled."""
    answer, shape = order.answer, order.shape
    while True:
        await news.wait()
        news.clear()
        if filling.done():
            return
        begun = b"" if events.stream.prepared else shape.begun(answer)
        await events.write(begun + shape.grown(answer, answer.reply.tell()))
