"""A weight sync that no engine took is tried again together by all ranks, while an engine comes back."""

import threading

import pytest

from slimerl.engine.fleet import NoEngineLeft
from slimerl.resharding.shard_sync import SyncEnded
from slimerl.resilience.deadline import DeadlineExceeded
from slimerl.samples.messages import EngineInfo, Status
from slimerl.training import repeated_sync
from slimerl.training.repeated_sync import TRIES, RepeatedSync

COMES = Status(0, 0, 0, 0, 0, {}, [], returning=["engine-0"])
JOINED = Status(0, 0, 0, 0, 0, {}, [EngineInfo("engine-0", "http://127.0.0.1:1", "key", 1)])
NOBODY = Status(0, 0, 0, 0, 0, {}, [])


class Failing:
    """A rank's part of a sync whose first `failures` tries come to nothing."""

    def __init__(self, failures: int, error: Exception | None) -> None:
        self.failures, self.error, self.tries = failures, error, 0

    def sync(self, version: int) -> dict[str, float]:
        self.tries += 1
        if self.tries <= self.failures and self.error is not None:
            raise self.error
        return {"send": float(version)}

    def close(self) -> None: ...


def ranks_syncing(
    failures: int, status: Status | Exception, other: Exception | None
) -> tuple[list[Failing], list[object]]:
    """Two ranks, the first of which coordinates; each one's part, and its result or error."""
    parts = [Failing(failures, NoEngineLeft("engine-0 died")), Failing(failures, other)]
    barrier, told, results = threading.Barrier(2, timeout=20), [False], list[object]([None, None])

    def agree(rank: int, value: bool) -> bool:
        if rank == 0:
            told[0] = value
        barrier.wait()
        agreed = told[0]
        barrier.wait()
        return agreed

    def told_of() -> Status:
        if isinstance(status, Exception):
            raise status
        return status

    def run(rank: int) -> None:
        asking = told_of if rank == 0 else None
        try:
            results[rank] = RepeatedSync(parts[rank], asking, lambda value: agree(rank, value)).sync(7)
        except Exception as error:  # noqa: BLE001
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return parts, results


@pytest.mark.parametrize("status", [COMES, JOINED], ids=["announced", "registered"])
@pytest.mark.parametrize("other", [None, SyncEnded("the first rank gave up")], ids=["gathers", "follows"])
def test_a5_a_sync_in_which_the_last_engine_died_is_done_again_by_every_rank(status, other):
    """Fault: no engine is left in two tries; the other rank has passed its part on, or was told of the end."""
    parts, results = ranks_syncing(2, status, other)
    assert [part.tries for part in parts] == [3, 3]
    assert results == [{"send": 7.0}] * 2


def test_a_sync_raises_where_no_engine_is_announced(monkeypatch):
    monkeypatch.setattr(repeated_sync, "ANNOUNCED_S", 0.1)
    parts, results = ranks_syncing(9, NOBODY, None)
    assert [part.tries for part in parts] == [1, 1]
    assert isinstance(results[0], NoEngineLeft)


def test_a3_a_rollout_role_that_does_not_answer_hides_no_failure_and_leaves_no_rank_waiting():
    """Fault: the role is frozen while the first rank asks it whether an engine comes back."""
    parts, results = ranks_syncing(9, DeadlineExceeded("waited for /status"), None)
    assert [part.tries for part in parts] == [1, 1]
    assert isinstance(results[0], NoEngineLeft)
    assert results[1] == {"send": 7.0}


def test_a_sync_is_tried_so_often_and_no_more():
    parts, results = ranks_syncing(99, COMES, None)
    assert [part.tries for part in parts] == [TRIES, TRIES]
    assert isinstance(results[0], NoEngineLeft)
