"""The pool of ranks itself: results in order, failures by name, hangs ended."""

import os
import time

import pytest
from rank_pool import RankFailed, RankPool


def sum_of_ranks() -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return os.getpid(), int(total)


def one_raises_while_the_other_waits() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def hang() -> None:
    time.sleep(1000)


def die() -> None:
    os._exit(3)


def test_ranks_stay_alive_and_each_call_has_a_process_group_of_its_own(ranks):
    first, second = ranks.run(2, sum_of_ranks), ranks.run(4, sum_of_ranks)
    assert [total for _, total in first] == [1, 1]
    assert [total for _, total in second] == [6] * 4
    assert [pid for pid, _ in first] == [pid for pid, _ in second[:2]]


@pytest.fixture
def own_pool():
    pool = RankPool()
    yield pool
    pool.close()


def test_a_rank_that_raises_is_named_with_its_traceback_although_another_waits_for_it(own_pool):
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 failed:(.|\n)*rank one has had enough") as failed:
        own_pool.run(2, one_raises_while_the_other_waits)
    assert "rank 0" in str(failed.value), "the one that waits is told as well"
    assert time.monotonic() - start < 60
    assert [total for _, total in own_pool.run(2, sum_of_ranks)] == [1, 1], "the next call gets new ranks"


def test_a_rank_that_hangs_or_dies_fails_the_call_and_shows_where_it_stood(own_pool):
    with pytest.raises(RankFailed, match=r"rank 0 has not answered(.|\n)*in hang"):
        own_pool.run(1, hang, deadline_s=1)
    with pytest.raises(RankFailed, match=r"rank 0 failed:\nthe process ended \(exit code 3\)"):
        own_pool.run(1, die)
