"""A SLURM of three nodes, for all tests that want one."""

from collections.abc import Iterator

import pytest
from slurm_cluster import Cluster, NoSlurm, install


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    try:
        install()
    except NoSlurm as reason:
        pytest.skip(str(reason))
    with Cluster(nodes=3) as started:
        yield started
