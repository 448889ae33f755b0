"""What all tests share, and which of them may run beside each other."""

import pytest

pytest_plugins = ["rank_fixtures", "engine_fixtures"]

OF_PROCESSES = {"ranks", "engines"}
"""Fixtures that start processes once for a test run; who uses them stays in one worker of pytest-xdist."""
WHOLE_RUNS = {"engine", "launch", "run"}
"""Rooms whose tests start roles of their own: one after the other, since each fills the machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`launch/test.sh` runs two workers: one has the tests that start processes, both share the others by file."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        heavy = fixtures & OF_PROCESSES or item.path.parent.name in WHOLE_RUNS
        item.add_marker(pytest.mark.xdist_group("processes" if heavy else item.path.stem))
