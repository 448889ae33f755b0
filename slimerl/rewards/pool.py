"""Worker processes that score responses, each of which can be killed and replaced at any time.

Flows in: `RewardRequest`s, from the event loop. Flows out: an `Outcome` for each, by the deadline.
Invariants: a request waits at most `timeout_s` for its worker's answer; a worker that missed the deadline, died,
spoke garbage, ran out of memory or left processes behind never scores again: it is killed with all its descendants
and replaced; closing the pool, or the end of this process, ends them all.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from slimerl.rewards.family import kill_family
from slimerl.rewards.frames import GarbledFrame, Job, Ready, Reply, Task, Verdict, pack, read_frame
from slimerl.rewards.outcome import Events, Failed, Outcome, RewardRequest, RewardUnavailable

logger = logging.getLogger(__name__)

MATH = "slimerl.rewards.math:score"

MEMORY_BYTES = 2 * 2**30
"""Address space of a worker; math-verify with sympy needs about a tenth."""
START_S = 60.0
"""For one worker to come up: an interpreter and sympy on a crowded machine."""
MAX_FAILED_STARTS = 3
"""In a row; then the fault lies in the installation and not in a response."""


class PoolError(RewardUnavailable):
    """Workers cannot be started; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, task: Task) -> Verdict:
        """Raises GarbledFrame, asyncio.IncompleteReadError or ConnectionError."""
        self.writer.write(pack(task))
        await self.writer.drain()
        verdict = await read_frame(self.reader, Verdict)
        if verdict.number != task.number:
            raise GarbledFrame(f"answer to task {verdict.number} where {task.number} was asked")
        return verdict


@dataclass
class WorkerPool:
    """`await start()`, then `score` as often as wished, concurrently; at the end `await close()`."""

    workers: int
    timeout_s: float
    scorer: str = MATH
    memory_bytes: int = MEMORY_BYTES
    options: dict[str, Any] | None = None
    """See `Job`, this and the next."""
    starts_programs: bool = False
    events: Events = field(default_factory=Events)
    """`worker_replaced`."""
    replaced: int = 0
    """Workers that had to be replaced so far."""
    _idle: asyncio.Queue[_Worker | None] = field(default_factory=asyncio.Queue)
    """None once there will be no more workers: whoever takes it puts it back for the next one."""
    _living: set[_Worker] = field(default_factory=set)
    _replacing: set[asyncio.Task[None]] = field(default_factory=set)
    _numbers: "count[int]" = field(default_factory=count)
    _failed_starts: int = 0
    _fault: str = ""

    async def start(self) -> None:
        """Start all workers, at the same time. Raises PoolError when one does not come up."""
        results = await asyncio.gather(*(self._launch() for _ in range(self.workers)), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.close()
            raise errors[0]

    async def score(self, request: RewardRequest) -> Outcome:
        """Judge one response; waits for a free worker first, which the deadline does not cover."""
        outcome = await self._ask(request, f"sample {request.sample_id}")
        return Failed("garbled", "a verdict was asked for") if isinstance(outcome, Reply) else outcome

    async def call(self, body: bytes, name: str) -> bytes | Failed:
        """As `score`, for a scorer that answers bytes with bytes; `name` is for the log."""
        outcome = await self._ask(body, name)
        if isinstance(outcome, Reply):
            return outcome.body
        return outcome if isinstance(outcome, Failed) else Failed("garbled", "a verdict was not asked for")

    async def _ask(self, request: RewardRequest | bytes, name: str) -> Outcome | Reply:
        worker = await self._take()
        if isinstance(worker, Failed):
            return worker
        fit = False
        try:
            async with asyncio.timeout(self.timeout_s):
                verdict = await worker.ask(Task(next(self._numbers), request))
            fit = not verdict.retire
            return verdict.outcome
        except TimeoutError:
            return Failed("timeout", f"no verdict within {self.timeout_s:g} s")
        except (asyncio.IncompleteReadError, ConnectionError):
            return Failed("worker_died", "the worker ended while it was scoring")
        except GarbledFrame as error:
            return Failed("garbled", str(error))
        finally:
            # Also when the caller was cancelled: the worker may be busy with its response for ever.
            if fit:
                self._idle.put_nowait(worker)
            else:
                self._replace(worker, name)

    async def close(self) -> None:
        """Kill every worker; requests still waiting are answered `Failed`."""
        self._give_up("the pool is closed")
        for task in list(self._replacing):
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(self._kill(worker) for worker in list(self._living)))

    def take_events(self) -> Counter[str]:
        return self.events.take()

    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [worker.process.pid for worker in self._living]

    async def _take(self) -> _Worker | Failed:
        worker = await self._idle.get()
        if worker is None or self._fault:
            self._idle.put_nowait(None)
            return Failed("no_worker", self._fault)
        return worker

    def _give_up(self, fault: str) -> None:
        self._fault = self._fault or fault
        self._idle.put_nowait(None)

    def _replace(self, worker: _Worker, name: str) -> None:
        logger.warning("worker %d of %s is replaced after %s", worker.process.pid, self.scorer, name)
        self.replaced += 1
        self.events["worker_replaced"] += 1
        task = asyncio.get_running_loop().create_task(self._kill_and_launch(worker))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _kill_and_launch(self, worker: _Worker) -> None:
        await self._kill(worker)
        while not self._fault:
            try:
                await self._launch()
            except PoolError as error:
                self._failed_starts += 1
                logger.error("%s", error)
                if self._failed_starts >= MAX_FAILED_STARTS:
                    self._give_up(f"{self._failed_starts} workers in a row did not start: {error}")
            else:
                self._failed_starts = 0
                return

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            job = Job(self.scorer, self.memory_bytes, self.options, self.starts_programs)
            arguments = [str(os.getpid()), str(theirs.fileno()), msgspec.json.encode(job).decode()]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "slimerl.rewards.worker"),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = _Worker(process, reader, writer)
        self._living.add(worker)
        try:
            async with asyncio.timeout(START_S):
                ready = await read_frame(reader, Ready)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, GarbledFrame) as error:
            await self._kill(worker)
            detail = f"nothing heard within {START_S:g} s" if isinstance(error, TimeoutError) else repr(error)
            raise PoolError(f"a reward worker did not start: {detail}, exit code {process.returncode}") from error
        if ready.error:
            await self._kill(worker)
            raise PoolError(f"a reward worker did not start: {ready.error}")
        self._idle.put_nowait(worker)

    async def _kill(self, worker: _Worker) -> None:
        self._living.discard(worker)
        worker.writer.close()
        # Looking through the process table takes milliseconds that the event loop should not lose.
        await asyncio.to_thread(kill_family, worker.process.pid)
        with contextlib.suppress(ProcessLookupError):
            worker.process.kill()
        await worker.process.wait()
