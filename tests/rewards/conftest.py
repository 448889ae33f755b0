"""What the tests of rewards share."""

import pytest
from sandbox_bench import bench_with


@pytest.fixture(scope="module")
def bench():
    with bench_with() as made:
        yield made
