"""When the ranks of a trainer begin anew in their processes, and when they do not: the parts that need no run."""

import os
import signal
import socket
import threading

import pytest
import torch.distributed as dist
from dismantled_ranks import left_of_a_dismantled_model
from tiny_models import make_tiny_model
from tiny_run import write_spec

from slimerl.engine.inside.mailbox import CoordinatorGone
from slimerl.resharding.shard_sync import SyncEnded
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.resilience.failure_kinds import FailureKind
from slimerl.spec import load_spec
from slimerl.training import in_process
from slimerl.training.checkpoint import directory
from slimerl.training.checkpoint.checkpointer import checkpoint_root
from slimerl.training.hang_up import hang_up, open_sockets
from slimerl.training.in_process import Board, InProcessRestarts, NotTogether, PeerFailed, kind_of_error
from slimerl.training.in_process_faults import in_process_faults

RANKS = 3


def boards() -> list[Board]:
    store = dist.HashStore()
    return [Board(store, rank, RANKS) for rank in range(RANKS)]


def in_time() -> Deadline:
    return Deadline("the other ranks", 20)


def all_meet(of: list[Board]) -> list[Exception | None]:
    """What became of each, in the order of `of`."""
    became: list[Exception | None] = [None] * len(of)

    def meet(number: int) -> None:
        try:
            of[number].meet(in_time())
        except (NotTogether, DeadlineExceeded) as error:
            became[number] = error

    threads = [threading.Thread(target=meet, args=(number,)) for number in range(len(of))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return became


def test_ranks_that_have_all_left_go_on_together_and_know_who_failed_first():
    ranks = boards()
    assert ranks[0].failed() == ""
    ranks[1].fail("the link broke")
    ranks[2].fail("its peer was gone")
    assert all_meet(ranks) == [None] * RANKS
    assert {rank.failed() for rank in ranks} == {"rank 1: the link broke"}


def test_a_rank_that_ends_of_its_own_error_takes_the_others_with_it():
    ranks = boards()
    ranks[0].fail("its peer was gone")
    ranks[1].end("AssertionError: wrong")
    became = all_meet([ranks[0], ranks[2]])
    assert [str(each) for each in became] == ["rank 1: AssertionError: wrong"] * 2
    assert all(isinstance(each, NotTogether) for each in became)


def test_a_rank_that_does_not_leave_is_waited_for_no_longer_than_it_may_be_and_named():
    ranks = boards()
    ranks[1].store.set("left-1", "1")
    with pytest.raises(DeadlineExceeded, match=r"the other ranks .*missing: 2"):
        ranks[0].meet(Deadline("the other ranks", 0.5))


def test_nothing_of_a_model_that_is_let_go_takes_memory(ranks, tmp_path):
    model = make_tiny_model("qwen3", tmp_path)
    assert ranks.run(1, left_of_a_dismantled_model, model) == [[]]


def test_whoever_waits_at_the_other_end_of_a_connection_comes_back_although_it_is_held():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as store:
        before = socket.create_connection(server.getsockname())
        kept = open_sockets()
        since = socket.create_connection(server.getsockname())
        spared = socket.create_connection(store.getsockname())
        ends = [server.accept()[0] for _ in range(2)]
        assert hang_up(kept | {name_of(each) for each in ends}, store.getsockname()[1]) == 1
        for end in ends:
            end.settimeout(0.2)
        assert ends[1].recv(1) == b"", "hung up"
        with pytest.raises(TimeoutError):
            ends[0].recv(1)
        assert spared.send(b"x") == 1
        for each in (before, since, spared, *ends):
            each.close()


def name_of(link: socket.socket) -> str:
    return os.readlink(f"/proc/self/fd/{link.fileno()}")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerFailed("another rank has failed"), FailureKind.INFRASTRUCTURE),
        (dist.DistNetworkError("reset"), FailureKind.INFRASTRUCTURE),
        (CoordinatorGone("Failed to recv, got 0 bytes"), FailureKind.INFRASTRUCTURE),
        (SyncEnded("the update to version 3 was not finished"), FailureKind.INFRASTRUCTURE),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] closed"), FailureKind.INFRASTRUCTURE),
        (RuntimeError("NCCL error: remote process exited"), FailureKind.INFRASTRUCTURE),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), FailureKind.PROGRAM),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FailureKind.PROGRAM),
        (AssertionError("gloo"), FailureKind.PROGRAM),
    ],
)
def test_only_what_ranks_have_in_common_is_tried_anew(error, kind):
    assert kind_of_error(error) is kind


def test_a_rank_that_waits_for_something_else_is_interrupted_where_another_one_fails(tmp_path, monkeypatch):
    """The other rank is played here: it fails, and has left at once."""
    monkeypatch.setattr(in_process, "LEAVE_S", 0.2)
    spec = load_spec(write_spec(tmp_path), ["resilience.in_process_restarts=1"])
    directory.complete_path(checkpoint_root(spec), 1).mkdir(parents=True)
    store = dist.HashStore()
    other = Board(dist.PrefixStore("board-0", store), 1, 2)
    before = signal.getsignal(in_process.INTERRUPT)
    restarts = InProcessRestarts(spec, store, 0, 2)
    attempts, done = [], []

    def attempt() -> None:
        attempts.append(restarts.used)
        restarts.when_left(lambda: done.append("left"))
        if restarts.used == 0:
            other.fail("the link broke")
            other.store.set("left-1", "1")
            silent, kept = socket.socketpair()
            with silent, kept:
                silent.settimeout(20)
                silent.recv(1)

    try:
        restarts.run(attempt)
    finally:
        signal.signal(in_process.INTERRUPT, before)
    assert (attempts, done) == ([0, 1], ["left"])
    assert restarts.text.startswith("rank 1: the link broke; all ranks began anew")


def test_without_a_checkpoint_the_error_itself_ends_the_rank_and_is_told_to_the_others(tmp_path):
    spec = load_spec(write_spec(tmp_path), ["resilience.in_process_restarts=1"])
    store, before = dist.HashStore(), signal.getsignal(in_process.INTERRUPT)

    def attempt() -> None:
        raise RuntimeError("gloo: timed out")

    try:
        with pytest.raises(RuntimeError, match="gloo: timed out"):
            InProcessRestarts(spec, store, 0, 2).run(attempt)
    finally:
        signal.signal(in_process.INTERRUPT, before)
    with pytest.raises(NotTogether, match="rank 0: RuntimeError: gloo"):
        Board(dist.PrefixStore("board-0", store), 1, 2).meet(in_time())


def faults(tmp_path, *overrides: str, cuda: bool = False, installed: bool = True) -> list[str]:
    spec = load_spec(write_spec(tmp_path), ["resilience.in_process_restarts=1", *overrides])
    return in_process_faults(spec, cuda, installed)


def test_what_cannot_begin_anew_is_refused_with_the_way_out(tmp_path):
    apart = "cluster.placement=disaggregated"
    assert faults(tmp_path) == []
    assert faults(tmp_path, apart, cuda=True) == []
    assert "placement: disaggregated" in faults(tmp_path, cuda=True)[0]
    assert "not installed" in faults(tmp_path, apart, cuda=True, installed=False)[0]
    assert "rollout.on_update: retract" in faults(tmp_path, "rollout.on_update=in_place")[0]
    assert "rollout.processes: 1" in faults(tmp_path, "rollout.processes=2", "engine.replicas=2")[0]
    assert faults(tmp_path, "rollout.on_update=in_place", "resilience.in_process_restarts=0") == []
