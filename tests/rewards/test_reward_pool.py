"""The worker pool against scorers that hang, fork, eat memory and print: each worker is killed and replaced."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slimerl.resilience.deadline import Deadline
from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored, Unparsable
from slimerl.rewards.pool import PoolError, WorkerPool

HOSTILE = "hostile_scorers:score"
SMALL = 256 * 2**20


@pytest.fixture(autouse=True)
def _workers_find_the_hostile_scorers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@contextlib.asynccontextmanager
async def pool(workers: int = 1, timeout_s: float = 5.0, **options):
    made = WorkerPool(workers, timeout_s, **{"scorer": HOSTILE, "memory_bytes": SMALL, **options})
    await made.start()
    try:
        yield made
    finally:
        pids = made.pids()
        await made.close()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


def request(behaviour: str, argument: object = "") -> RewardRequest:
    return RewardRequest(f"sample-{behaviour}", behaviour, str(argument))


async def judged(behaviour: str, argument: object = "", timeout_s: float = 5.0) -> tuple[Outcome, int]:
    """The outcome, and how many workers it cost; the pool must score as before afterwards."""
    async with pool(timeout_s=timeout_s) as workers:
        outcome = await workers.score(request(behaviour, argument))
        assert await workers.score(request("right")) == Scored(1.0, True)
        return outcome, workers.replaced


def processes_with(marker: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if marker in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [
        ("right", Scored(1.0, True)),
        ("wrong", Scored(0.0, False)),
        ("unparsable", Unparsable()),
        ("own_failure", Failed("own", "as asked")),
        ("not_finite", Failed("not_finite", "the reward is nan")),
        ("raises", Failed("error", "ValueError: no such thing")),
    ],
)
def test_r2_outcomes_arrive_as_the_scorer_gave_them(behaviour, outcome):
    assert asyncio.run(judged(behaviour)) == (outcome, 0)


@pytest.mark.parametrize("behaviour", ["hangs", "deaf"])
def test_r1_a_scorer_that_hangs_is_killed_at_the_deadline_and_replaced(behaviour):
    """Fault: an endless loop, also one that ignores every signal but SIGKILL."""
    begun = time.monotonic()
    outcome, replaced = asyncio.run(judged(behaviour, timeout_s=0.5))
    assert outcome == Failed("timeout", "no verdict within 0.5 s")
    assert replaced == 1
    assert time.monotonic() - begun < 10


def test_r1_an_expression_that_math_verify_cannot_finish_is_killed():
    """Fault: a tower of powers, as a model may write one; without the outer deadline this never ends."""

    async def scene() -> None:
        async with pool(scorer="slimerl.rewards.math:score", memory_bytes=2**30, timeout_s=1.5) as workers:
            tower = RewardRequest("s", r"\boxed{9^{9^{9^{9}}}}", "3")
            assert (await workers.score(tower)).reason in ("timeout", "memory")
            assert await workers.score(RewardRequest("t", "3", "3")) == Scored(1.0, True, said="3")
            assert workers.replaced == 1

    asyncio.run(scene())


def test_r1_a_scorer_that_eats_memory_is_stopped_and_replaced():
    """Fault: memory without end; the limit stops it long before the machine feels it."""
    outcome, replaced = asyncio.run(judged("eats_memory"))
    assert isinstance(outcome, Failed)
    assert outcome.reason == "memory"
    assert replaced == 1


@pytest.mark.parametrize("behaviour", ["forks", "forks_and_hangs"])
def test_r1_processes_that_a_scorer_leaves_behind_are_killed(behaviour, tmp_path):
    """Fault: children in sessions of their own, one of them orphaned, from a scorer that answers or hangs."""
    marker = f"{tmp_path}-{behaviour}"

    async def scene() -> tuple[Outcome, int]:
        async with pool(timeout_s=30.0 if behaviour == "forks" else 3.0) as workers:
            outcome = await workers.score(request(behaviour, marker))
            assert await workers.score(request("right")) == Scored(1.0, True)
            return outcome, workers.replaced

    outcome, replaced = asyncio.run(scene())
    if os.getuid() == 0:
        assert outcome == Scored(1.0, True) if behaviour == "forks" else outcome.reason == "timeout"
        assert replaced == 1
    else:
        # The kernel refuses the fork itself.
        assert outcome.reason == "error"
    assert processes_with(marker) == []


def test_r1_gigabytes_of_output_reach_nobody():
    """Fault: a scorer that prints 2 GiB; this process must not grow, and the verdict still comes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome, replaced = asyncio.run(judged("prints", 1.0, timeout_s=30.0))
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert (outcome, replaced) == (Scored(1.0, True), 0)
    assert grown_mib < 64


@pytest.mark.parametrize("open_files", [0, 100])
def test_r1_garbage_on_the_protocol_channel_costs_only_the_worker(open_files):
    """Fault: the scorer writes endlessly to every descriptor it can find; with files open here, a higher number."""
    with contextlib.ExitStack() as files:
        for _ in range(open_files):
            files.enter_context(open(os.devnull, "rb"))
        outcome, replaced = asyncio.run(judged("floods_every_descriptor", timeout_s=30.0))
    assert isinstance(outcome, Failed)
    assert outcome.reason == "garbled"
    assert replaced == 1


def test_r1_a_worker_that_dies_is_replaced():
    outcome, replaced = asyncio.run(judged("exits"))
    assert isinstance(outcome, Failed)
    assert outcome.reason == "worker_died"
    assert replaced == 1


def test_workers_score_side_by_side():
    async def scene() -> float:
        async with pool(workers=2) as workers:
            begun = time.monotonic()
            await asyncio.gather(*(workers.score(request("naps", 0.5)) for _ in range(4)))
            return time.monotonic() - begun

    assert 1.0 <= asyncio.run(scene()) < 1.8


def test_a6_a_cancelled_request_costs_no_worker_slot():
    """Fault: callers cancelled while scoring and while waiting; a leaked worker would leave the pool empty."""

    async def scene() -> None:
        async with pool(timeout_s=60.0) as workers:
            for _ in range(3):
                tasks = [asyncio.ensure_future(workers.score(request("hangs"))) for _ in range(3)]
                await asyncio.sleep(0.05)
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(result, asyncio.CancelledError) for result in results)
                async with asyncio.timeout(10):
                    assert await workers.score(request("right")) == Scored(1.0, True)

    asyncio.run(scene())


def test_a_scorer_that_cannot_be_loaded_is_said_at_the_start():
    async def scene() -> None:
        await WorkerPool(2, 5.0, scorer="no_such_module:score").start()

    with pytest.raises(PoolError, match="cannot load no_such_module:score"):
        asyncio.run(scene())


def test_requests_waiting_when_the_pool_closes_are_answered():
    async def scene() -> list[Outcome]:
        workers = WorkerPool(1, 60.0, scorer=HOSTILE, memory_bytes=SMALL)
        await workers.start()
        tasks = [asyncio.ensure_future(workers.score(request("hangs"))) for _ in range(3)]
        await asyncio.sleep(0.05)
        await workers.close()
        async with asyncio.timeout(5):
            return await asyncio.gather(*tasks)

    reasons = [outcome.reason for outcome in asyncio.run(scene())]
    assert sorted(reasons) == ["no_worker", "no_worker", "worker_died"]


def test_a5_workers_end_with_the_process_that_started_them():
    """Fault: SIGKILL to the owner, which leaves it no time to clean up, while its workers are busy for ever."""
    program = (
        "import asyncio\n"
        "from slimerl.rewards.outcome import RewardRequest\n"
        "from slimerl.rewards.pool import WorkerPool\n"
        "async def main():\n"
        f"    pool = WorkerPool(2, 600.0, scorer={HOSTILE!r})\n"
        "    await pool.start()\n"
        "    busy = [asyncio.ensure_future(pool.score(RewardRequest('s', 'deaf', ''))) for _ in range(2)]\n"
        "    await asyncio.sleep(0.1)\n"
        "    print(*pool.pids(), flush=True)\n"
        "    await asyncio.gather(*busy)\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    try:
        Deadline("workers to end with their owner", 10).wait_until(lambda: not any(map(alive, pids)), poll_s=0.02)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
