"""What all tests share, and which of them may run beside each other."""

import gc
import os
import re
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from slimerl.resilience.name_lookups import bounded_lookups

os.environ.update(bounded_lookups())

pytest_plugins = ["rank_fixtures", "engine_fixtures"]

FIXTURES = {"engines": re.compile(r"def \w+\([^)]*\bengines\b"), "ranks": re.compile(r"def \w+\([^)]*\branks\b")}
"""They start processes once for a worker of pytest-xdist: who uses one of them stays in one worker."""
ROOMS = {"chaos": "run", "engine": "engines", "launch": "launch", "run": "run"}
"""Their tests start roles of their own: those of a room one after the other, since they fill the machine."""
FIRST = ("engines", "ranks", "launch", "run")
"""The long lanes; files of other tests fill up what is left at the end."""


class Lanes(LoadScopeScheduling):
    """One worker has the tests with engines, another those with trainer ranks, a third those of `launch`: they wait for
    SLURM most of the time, and it ends with them, since two busy workers fill two cores. In the end one of the two has
    those of `run` and `chaos`, while the other has all others by file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return lane_of(self.config.rootpath / file) or file

    def _reschedule(self, node: WorkerController) -> None:
        if len(self.nodes) > 2 and "launch" in self.assigned_work[node]:
            node.shutdown()
        else:
            super()._reschedule(node)


@cache
def lane_of(file: Path) -> str | None:
    text = file.read_text()
    return ROOMS.get(file.parent.name) or next((lane for lane, uses in FIXTURES.items() if uses.search(text)), None)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    """For `pytest -n 3`, as `launch/test.sh` has it."""
    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`
    return Lanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        lane = lane_of(item.path)
        return FIRST.index(lane) if lane else len(FIRST)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What has been imported lives on; to look through it would take longer than many a test that collects."""
    gc.freeze()
