"""A rank that hangs where no conductor watches is killed by its monitor: nvidia-resiliency-ext's real launcher."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tiny_run import write_spec

from slimerl.resilience.deadline import Deadline
from slimerl.resilience.rank_monitor import monitor_options
from slimerl.spec import load_spec
from slimerl.training.launcher import PROGRAM, Place, launcher_command

SILENCE_S = 3.0
START_S = 60.0
RANK = """
import os, pathlib, signal, sys, time
from slimerl.resilience import heartbeat
from slimerl.resilience.processes import die_with_parent

die_with_parent(os.getppid())
here, hangs = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]

def stand_here():
    time.sleep(120)

heartbeat.start(here, f"trainer-{rank}", {"train": 1.0}, 60.0)
size, first = os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]
print(f"rank {rank} of {size} is node {sys.argv[3]}, first: {first}", flush=True)
if rank == "0" and hangs == "died":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1" and hangs == "late":
    heartbeat.enter("train")
    stand_here()
if rank == "1" and hangs == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
while not (here / "go").exists():
    heartbeat.beat()
    time.sleep(0.05)
heartbeat.stop()
"""


def test_a_rank_may_be_silent_as_long_as_the_deadline_says_from_its_first_word_on():
    options = monitor_options(120.0)
    told = dict(zip(options[::2], options[1::2], strict=True))
    assert told["--ft-initial-rank-heartbeat-timeout"] == told["--ft-rank-heartbeat-timeout"] == "120"
    assert told["--ft-workload-check-interval"] == "5"
    quick = monitor_options(2.0)
    assert float(quick[quick.index("--ft-workload-check-interval") + 1]) < 2.0, "a look must come in time"


class Launched:
    """One node's launcher, and what it and its ranks say."""

    def __init__(self, directory: Path, port: int, hangs: str, node: int = 0, nodes: int = 1, ranks: int = 2) -> None:
        # a spec in which a node has so many ranks
        sizes = {"parallel": {"data": nodes * ranks}}
        spec = write_spec(directory, training=sizes, cluster={"gpus_per_node": ranks}, deadlines={"alive_s": SILENCE_S})
        command = launcher_command(load_spec(spec), Place("127.0.0.1", port, node), [], monitored=True)
        program = directory / "rank.py"
        program.write_text(RANK)
        self.log = directory / f"log-{node}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command[: command.index(PROGRAM) - 1], str(program), str(directory), hangs, str(node)],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until_said(self, text: str, times: int = 1) -> None:
        deadline = Deadline(f"'{text}' in the launcher's log", START_S)
        try:
            deadline.wait_until(lambda: self.text().count(text) >= times or self.process.poll() is not None)
        finally:
            assert self.text().count(text) >= times, self.text()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def launch(tmp_path):
    pytest.importorskip("nvidia_resiliency_ext")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = []

    def launch(hangs="none", **place):
        launched.append(Launched(tmp_path, port, hangs, **place))
        return launched[-1]

    yield launch
    for one in launched:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


def test_a_rank_that_does_not_get_on_shows_its_stacks_is_killed_and_is_named(launch):
    node = launch("late")
    assert node.process.wait(START_S) == 1
    said = node.text()
    assert "does not get on in 'train'; its threads:" in said
    assert "in stand_here" in said
    assert ":1] Did not get subsequent heartbeat. Waited 3.00 seconds." in said
    assert "failed (exitcode: -9) local_rank: 1" in said
    assert ":0] Did not get" not in said, "rank 0 got on"


def test_a_rank_that_was_stopped_by_a_signal_is_killed_too(launch):
    node = launch("stopped")
    assert node.process.wait(START_S) == 1
    assert "failed (exitcode: -9) local_rank: 1" in node.text()


def test_a_rank_whose_monitor_is_gone_says_so_and_goes_on(launch, tmp_path):
    node = launch()
    node.until_said("is node 0", times=2)
    for process in node.children():
        if "rank_monitor" in " ".join(process.cmdline()):
            process.kill()
    node.until_said("a hang of this rank goes unnoticed", times=2)
    (tmp_path / "go").touch()
    assert node.process.wait(START_S) == 0, node.text()


def test_nothing_outlives_a_launcher_that_is_killed(launch):
    node = launch()
    node.until_said("is node 0", times=2)
    processes = node.children()
    assert len(processes) == 4, "two ranks, and a monitor of each"
    node.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def test_ranks_are_numbered_by_the_numbers_of_their_nodes_whichever_comes_first(launch, tmp_path):
    """Three nodes of one rank each, on this machine; the last starts first."""
    nodes = [launch(node=node, nodes=3, ranks=1) for node in (2, 1, 0)]
    for one, node in zip(nodes, (2, 1, 0), strict=True):
        one.until_said(f"rank {node} of 3 is node {node}, first: 127.0.0.1")
    (tmp_path / "go").touch()
    assert [one.process.wait(START_S) for one in nodes] == [0, 0, 0]


def test_the_first_node_does_not_wait_long_for_the_others_when_one_of_its_ranks_died(launch):
    """The rank of the other node gets on all the time, as one does whose collectives have not failed yet."""
    first, other = (launch("died", node=node, nodes=2, ranks=1) for node in (0, 1))
    assert first.process.wait(START_S) == 1
    assert "failed (exitcode: -9) local_rank: 0" in first.text()
    assert other.process.poll() is None
