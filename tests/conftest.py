"""What all tests share, and which of them may run beside each other."""

import re
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["rank_fixtures", "engine_fixtures"]

OF_PROCESSES = re.compile(r"def \w+\([^)]*\b(ranks|engines)\b")
"""Fixtures that start processes once for a test run: who uses them stays in one worker of pytest-xdist."""
WHOLE_RUNS = {"engine", "launch", "run"}
"""Rooms whose tests start roles of their own: one after the other, since each fills the machine."""


class TwoLanes(LoadScopeScheduling):
    """One worker has the tests that start processes, file after file; the others share the rest by file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "processes" if starts_processes(self.config.rootpath / file) else file


@cache
def starts_processes(file: Path) -> bool:
    return file.parent.name in WHOLE_RUNS or OF_PROCESSES.search(file.read_text()) is not None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> TwoLanes:
    """For `pytest -n 2`, as `launch/test.sh` has it."""
    return TwoLanes(config, log)
