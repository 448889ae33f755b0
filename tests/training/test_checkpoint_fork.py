"""The process that writes a checkpoint is forked from one with many threads: a child that never starts is given up."""

import subprocess
import sys

import checkpoint_ranks
import tiny

STUCK_CHILDREN = """
import os, sys, time
from pathlib import Path
from slimerl.training.checkpoint import write
write.FORK_S, directory, stuck = 0.5, Path(sys.argv[1]), int(sys.argv[2])
forked = 0
def count():
    global forked
    forked += 1
os.register_at_fork(before=count, after_in_child=lambda: time.sleep(1000) if forked <= stuck else None)
try:
    child = write.Child(lambda: (directory / "written").write_text("all"))
    while child.is_running():
        time.sleep(0.01)
    child.check()
    print("written after", forked)
except OSError as error:
    print(error)
"""


def outcome(directory, stuck: int) -> str:
    command = [sys.executable, "-c", STUCK_CHILDREN, str(directory), str(stuck)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout.strip()


def test_a5_a_child_that_hangs_in_its_fork_is_replaced_and_the_checkpoint_is_written(tmp_path):
    """Injected: what Python does in a child after a fork never ends, twice."""
    assert outcome(tmp_path, stuck=2) == "written after 3"
    assert (tmp_path / "written").read_text() == "all"


def test_a_fork_that_never_works_is_an_error_that_says_so(tmp_path):
    assert outcome(tmp_path, stuck=99) == "a forked process did not start within 0.5 s, 5 times in a row"


MANY_FILES = """
import os, resource, sys
from pathlib import Path
from slimerl.training.checkpoint import write
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
child = write.Child(lambda: (Path(sys.argv[1]) / "written").write_text("all"))
os.waitpid(child._pid, 0)
"""


def test_c5_a_trainer_with_many_open_files_writes_its_checkpoints(tmp_path):
    """Injected: descriptors beyond the 1,024 that `select` takes."""
    subprocess.run([sys.executable, "-c", MANY_FILES, str(tmp_path)], timeout=100, check=True)
    assert (tmp_path / "written").read_text() == "all"


def test_no_writer_outlives_a_collective_that_fails(ranks, tmp_path):
    """Injected: in a rank that lives on, and may write the same checkpoint once more."""
    tiny.write_model(tmp_path / "model", "qwen3")
    [left] = ranks.run(1, checkpoint_ranks.writers_left, tmp_path / "model", tmp_path / "root")
    assert left == {"local, begun": 0, "local, waiting": 0, "shared, begun": 0, "shared, waiting": 0}
