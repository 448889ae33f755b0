"""A reward service whose answers take as long as a Pareto law says: the heavy tail of judges, sandboxes and tools.

Flows in: the exchange of `slimerl/rewards/http.py`. Flows out: right or wrong by the exact rule, late.
Invariant: how late is a function of the sample's id alone, so that every mode of a run meets the same tail.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import xxhash
from aiohttp import web

from slimerl.resilience.deadline import Deadline
from slimerl.rewards.exact import score
from slimerl.rewards.outcome import RewardRequest, Scored

PORT = 28_411
START_S = 30.0
CAP = 40.0
"""Times the mean: a law with so heavy a tail has samples that nobody would wait for."""


def delay_s(sample_id: str, mean_s: float, shape: float) -> float:
    """Of the sample's reward: Pareto's law with that mean and tail exponent, capped at `CAP` means."""
    uniform = (xxhash.xxh64_intdigest(sample_id.encode()) + 1) / 2**64
    return min(CAP * mean_s, mean_s * (shape - 1) / shape * uniform ** (-1 / shape))


@contextmanager
def serve(mean_s: float, shape: float, port: int = PORT) -> Iterator[str]:
    """The address of the service, which runs in a thread until the block ends."""

    async def judge(request: web.Request) -> web.Response:
        asked = msgspec.convert(await request.json(), RewardRequest)
        await asyncio.sleep(delay_s(asked.sample_id, mean_s, shape))
        outcome = score(asked)
        answer = {"reward": outcome.reward, "correct": outcome.correct} if isinstance(outcome, Scored) else {}
        return web.json_response(answer or {"unparsable": True})

    async def listen() -> None:
        application = web.Application()
        application.router.add_post("/", judge)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            listening.set()
            await asyncio.to_thread(ended.wait)
        finally:
            await runner.cleanup()

    listening, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(listen()), name="slow rewards", daemon=True)
    thread.start()
    try:
        Deadline(f"the reward service to listen on port {port}", START_S).wait_until(
            lambda: listening.is_set() or not thread.is_alive()
        )
        if not listening.is_set():
            raise RuntimeError(f"the reward service could not listen on 127.0.0.1:{port}; is the port taken?")
        yield f"http://127.0.0.1:{port}/"
    finally:
        ended.set()
        thread.join(START_S)
