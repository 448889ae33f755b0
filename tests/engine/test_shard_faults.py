"""What goes wrong while shards are under way: with staging every engine that is left is on the old version or on the
new one; without, whoever did not come to the end is named as dirty."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest
import torch
from engine_fixtures import Engines, RunningEngine
from reference import largest_difference, logprobs_of
from shard_trainers import Trainers, flipped_bit
from tiny_models import tiny_model

from slimerl.engine.fleet import NoEngineLeft
from slimerl.engine.protocol import SamplingParams
from slimerl.resharding.shard_sync import SyncEnded, TransferFailed
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import ReleaseRequest

PROMPT = [10, 20, 30, 40, 50]
HANG_S = 12.0
"""Of a sync in which a member stands still: each attempt lasts a sixth of it."""


@pytest.fixture(scope="module")
def three(engines: Engines) -> Iterator[list[RunningEngine]]:
    """The session's engine, and two that tests may harm."""
    steady = engines("qwen3")
    with engines.brief(("qwen3", 1), ("qwen3", 1)) as victims:
        yield [steady, *victims]


def other_model(seed: int) -> Any:
    return tiny_model("qwen3", seed=seed)


def assert_is(engine: RunningEngine, model: Any, version: int) -> None:
    result = engine.ask(lambda client: client.generate(PROMPT, SamplingParams(16, temperature=0.0)))
    assert largest_difference(logprobs_of(model, PROMPT, result.tokens), result.logprobs) < 1e-4
    assert set(result.versions) == {version}


def ranks_of(engine: RunningEngine) -> list[psutil.Process]:
    root = psutil.Process(engine.server.process.pid)
    return [one for one in root.children(recursive=True) if one.name().startswith("sglang::sched")]


def receivers(engine: RunningEngine) -> int:
    """Threads of an engine's ranks beyond those of generation are the receiver's and its links'."""
    return sum(rank.num_threads() for rank in ranks_of(engine))


def names(engines: list[RunningEngine]) -> list[str]:
    return [engine.info.engine_id for engine in engines]


def test_generation_goes_on_under_the_old_version_while_parcels_arrive(three: list[RunningEngine]) -> None:
    old, new = other_model(50), other_model(51)
    with Trainers(three) as trainers:
        trainers.sync(1, old)
        for engine in three:
            assert_is(engine, old, 1)

        def generate_meanwhile() -> None:
            for engine in three:
                assert_is(engine, old, 1)

        trainers.strike(1, 6, generate_meanwhile)
        phases = trainers.sync(2, new)
        assert trainers.weights[1].strike is None, "the transfer was under way"
        for engine in three:
            assert_is(engine, new, 2)
    assert {
        "plan",
        "transfer",
        "hold",
        "pause",
        "copy",
        "digest",
        "apply",
        "commit",
        "resume",
        "release",
    } <= phases.keys()
    assert phases["stall"] < phases["transfer"]


def test_engines_join_and_leave_between_syncs(three: list[RunningEngine]) -> None:
    """Who is new, or was not there for a while, is taken in while all are held; the next sync is made ahead again."""
    with Trainers(three) as trainers:
        for version, present in enumerate([three[:2], three[:2], three, three, three[1:], three[1:]], start=1):
            model = other_model(80 + version)
            trainers.desk.engines = [engine.info for engine in present]
            phases = trainers.sync(version, model)
            assert trainers.desk.released[-1] == ReleaseRequest("lease", version, names(present), {})
            ahead = version % 2 == 0
            assert ("open" not in phases) == ahead
            for engine in present:
                assert_is(engine, model, version)


def test_w12_bits_that_flip_on_a_link_are_seen_before_the_commit_and_the_parcels_sent_again(
    three: list[RunningEngine], monkeypatch: Any
) -> None:
    """Fault: a parcel loses a bit behind its checksum, once."""
    with Trainers(three) as trainers:
        trainers.sync(1, other_model(52))
        with flipped_bit(monkeypatch, 1) as hit:
            trainers.sync(2, other_model(53))
        assert len(hit) == 1
        assert trainers.desk.released[-1] == ReleaseRequest("lease", 2, names(three), {})
        for engine in three:
            assert_is(engine, other_model(53), 2)


def test_w12_bits_that_flip_every_time_leave_the_engine_on_its_version_and_name_the_hop(
    three: list[RunningEngine], monkeypatch: Any
) -> None:
    """Fault: every parcel that leaves the trainers loses a bit. No engine gets the version; all stay as they were."""
    old = other_model(54)
    with Trainers(three) as trainers:
        trainers.sync(1, old)
        with flipped_bit(monkeypatch, 10**9), pytest.raises(TransferFailed, match=r"parcel \d+ came with other bytes"):
            trainers.sync(2, other_model(55))
        for engine in three:
            assert_is(engine, old, 1)
        trainers.sync(3, other_model(55))
        for engine in three:
            assert_is(engine, other_model(55), 3)


def test_a_trainer_rank_that_misses_the_deadline_is_named_and_the_engines_stay_on_their_version(
    three: list[RunningEngine],
) -> None:
    """Fault: a trainer rank stands still amid its parcels."""
    old, awake = other_model(56), threading.Event()
    with Trainers(three, sync_s=HANG_S) as trainers:
        trainers.sync(1, old)
        trainers.strike(1, 6, lambda: awake.wait(HANG_S) and None)
        began = time.monotonic()
        threading.Timer(HANG_S * 0.8, awake.set).start()
        with pytest.raises(TransferFailed, match="trainer/1 does not answer"):
            trainers.sync(2, other_model(57))
        assert time.monotonic() - began < HANG_S
        for engine in three:
            assert_is(engine, old, 1)


def test_w12_an_engine_that_stands_still_is_named_and_comes_back_with_the_next_version(
    three: list[RunningEngine],
) -> None:
    """Fault: an engine's ranks are stopped amid a transfer; its HTTP server still answers."""
    *steady, victim = three
    with Trainers(three, sync_s=2 * HANG_S) as trainers:
        trainers.sync(1, other_model(70))
        stopped = ranks_of(victim)
        trainers.strike(1, 6, lambda: [rank.send_signal(signal.SIGSTOP) for rank in stopped] and None)
        began = time.monotonic()
        try:
            trainers.sync(2, other_model(71))
        finally:
            for rank in stopped:
                rank.send_signal(signal.SIGCONT)
        assert time.monotonic() - began < 2 * HANG_S
        release = trainers.desk.released[-1]
        assert release.whole == names(steady)
        assert "no answer within" in release.dirty[victim.info.engine_id]
        for engine in steady:
            assert_is(engine, other_model(71), 2)
        trainers.sync(3, other_model(72))
        assert trainers.desk.released[-1] == ReleaseRequest("lease", 3, names(three), {})
        for engine in three:
            assert_is(engine, other_model(72), 3)


def test_w2_engines_that_do_not_fit_are_named_before_the_first_byte(three: list[RunningEngine]) -> None:
    """Faults: an engine of another size than planned; engines that keep another dtype than is sent."""
    old = other_model(73)
    with Trainers(three) as trainers:
        larger = msgspec.structs.replace(three[2].info, tensor_parallel=2)
        trainers.desk.engines = [three[0].info, three[1].info, larger]
        trainers.sync(1, old)
        release = trainers.desk.released[-1]
        assert release.whole == names(three[:2])
        assert release.dirty == {larger.engine_id: f"{larger.engine_id} has 2 ranks, the plan is for 1"}
    with (
        Trainers(three[:2], dtype=torch.bfloat16) as trainers,
        pytest.raises(NoEngineLeft, match=r"is float32, but .* would be sent as bfloat16; where .* broadcast"),
    ):
        trainers.sync(2, other_model(74))
    assert list(trainers.desk.released[-1].dirty) == names(three[:2])
    with Trainers(three) as trainers:
        trainers.sync(3, old)
        for engine in three:
            assert_is(engine, old, 3)


def test_without_staging_engines_that_a_failed_sender_left_half_written_are_named(three: list[RunningEngine]) -> None:
    """Fault: a trainer rank fails amid its parcels. A whole rewrite mends the engines."""
    with Trainers(three, staged=False) as trainers:
        trainers.sync(1, other_model(75))

        def fail() -> None:
            raise OSError("injected")

        trainers.strike(1, 6, fail)
        with pytest.raises(TransferFailed, match="trainer/1: OSError: injected"):
            trainers.sync(2, other_model(76))
        release = trainers.desk.released[-1]
        assert release.whole == []
        assert sorted(release.dirty) == names(three)
        assert isinstance(trainers.results[1], SyncEnded), "no rank goes on"
        trainers.sync(3, other_model(76))
        for engine in three:
            assert_is(engine, other_model(76), 3)


def killed_amid_a_transfer(engines: list[RunningEngine]) -> None:
    with Trainers(engines) as trainers:
        trainers.sync(1, other_model(58))
        trainers.strike(1, 6, lambda: os._exit(9))
        trainers.sync(2, other_model(59))


def test_w12_a_sender_that_is_killed_leaves_the_engines_on_their_version_and_no_thread_in_them(
    three: list[RunningEngine],
) -> None:
    """Fault: the trainer's process ends amid a transfer. Its receivers end, and another trainer's take their place."""
    before = [receivers(engine) for engine in three]
    process = multiprocessing.get_context("spawn").Process(target=killed_amid_a_transfer, args=(_plain(three),))
    process.start()
    process.join(120)
    assert process.exitcode == 9
    for engine in three:
        assert_is(engine, other_model(58), 1)
    patience = time.monotonic() + 20
    while [receivers(engine) for engine in three] > before and time.monotonic() < patience:
        time.sleep(0.2)
    assert [receivers(engine) for engine in three] <= before
    with Trainers(three) as trainers:
        trainers.sync(3, other_model(59))
        for engine in three:
            assert_is(engine, other_model(59), 3)


def _plain(engines: list[RunningEngine]) -> list[Any]:
    """What a process needs that only syncs."""
    from types import SimpleNamespace

    return [SimpleNamespace(info=engine.info, model_path=engine.model_path) for engine in engines]


def is_within(now: list[tuple[int, int]], then: list[tuple[int, int]]) -> bool:
    return all(after <= before for pair in zip(now, then, strict=True) for after, before in zip(*pair, strict=True))


def test_w7_threads_files_and_memory_are_flat_over_fifty_syncs(three: list[RunningEngine]) -> None:
    processes = [psutil.Process(), *(rank for engine in three for rank in ranks_of(engine))]
    model = other_model(60)
    with Trainers(three) as trainers:

        def taken() -> list[tuple[int, int]]:
            return [(process.num_threads(), process.num_fds()) for process in processes]

        for version in range(1, 11):
            trainers.sync(version, model)
        early, resident = taken(), [process.memory_info().rss for process in processes]
        for version in range(11, 51):
            trainers.sync(version)
        # A thread that has done its part is still there for a moment.
        settled = Deadline(f"threads and descriptors to go back to {early}", 10.0)
        settled.wait_until(lambda: is_within(taken(), early), detail=lambda: f"now {taken()}")
        for process, was in zip(processes, resident, strict=True):
            assert process.memory_info().rss - was < 8 * 2**20
        assert [request.whole for request in trainers.desk.released] == [names(three)] * 50


@pytest.mark.parametrize("staged", [True, False])
def test_w12_an_engine_that_is_killed_amid_a_transfer_is_named_and_the_others_get_the_version(
    three: list[RunningEngine], staged: bool
) -> None:
    """Fault: SIGKILL of an engine while parcels are packed. Stand last: the engines are gone afterwards."""
    living = [engine for engine in three if engine.server.process.poll() is None]
    victim = living.pop()
    new = other_model(62 + staged)
    with Trainers([*living, victim], staged) as trainers:
        trainers.sync(1, other_model(61))
        root = psutil.Process(victim.server.process.pid)

        def kill() -> None:
            for process in [root, *root.children(recursive=True)]:
                process.kill()

        trainers.strike(1, 6, kill)
        began = time.monotonic()
        trainers.sync(2, new)
        assert time.monotonic() - began < 20, "a closed connection is noticed at once"
        release = trainers.desk.released[-1]
        assert release.whole == names(living)
        assert list(release.dirty) == names([victim])
        assert "does not answer" in release.dirty[victim.info.engine_id]
        for engine in living:
            assert_is(engine, new, 2)
