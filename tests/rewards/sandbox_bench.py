"""A running code reward for tests."""

import asyncio
import contextlib
import json

import psutil

from slimerl.rewards.build import build_reward
from slimerl.rewards.outcome import Outcome, RewardRequest
from slimerl.rewards.pool import WorkerPool
from slimerl.spec.reward import CodeReward

OPTIONS = {"kind": "code", "timeout_s": 60.0, "test_cpu_s": 1, "test_wall_s": 5.0}
ECHO = json.dumps({"tests": [{"stdin": "ping\n", "stdout": "ping\n"}]})


class Bench:
    """A running pool and the loop that it belongs to."""

    def __init__(self, **options) -> None:
        self.loop = asyncio.new_event_loop()
        self.pool: WorkerPool = build_reward(CodeReward(**OPTIONS | options))
        self.loop.run_until_complete(self.pool.start())

    def judge(self, source: str, answer: str = ECHO) -> Outcome:
        return self.loop.run_until_complete(self.pool.score(request(source, answer)))

    @property
    def worker(self) -> psutil.Process:
        (pid,) = self.pool.pids()
        return psutil.Process(pid)

    def programs(self) -> list[psutil.Process]:
        """Processes of programs, orphans among them: the worker is their subreaper."""
        return self.worker.children(recursive=True)

    def close(self) -> None:
        self.loop.run_until_complete(self.pool.close())
        self.loop.close()


@contextlib.contextmanager
def bench_with(**options):
    made = Bench(**options)
    try:
        yield made
    finally:
        made.close()


def request(source: str, answer: str = ECHO) -> RewardRequest:
    return RewardRequest("sample", f"Here it is:\n```python\n{source}\n```\n", answer)
