"""What a role takes of the machine is measured, published as a whole, and told per kind of role."""

import os
import subprocess
import sys

import numpy as np
import psutil
import pytest

from slimerl.telemetry.resources import GIB, ResourceMeter, collect, heap_usage, usage
from slimerl.telemetry.slopes import robust_slope

THREADS = 3
HOLD = f"""
import sys, threading
for _ in range({THREADS}):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
ballast = bytearray(64 * 2**20)
files = [open("/dev/null") for _ in range(20)]
print("ready", flush=True)
sys.stdin.read()
"""


def test_memory_and_threads_of_a_process_are_those_that_psutil_tells():
    """Of a process of its own: this one may have rank processes as children, which count as its own."""
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        found, told = usage(child.pid), psutil.Process(child.pid)
        assert found["rss_gib"] == pytest.approx(told.memory_info().rss / GIB, rel=0.02)
        assert found["peak_gib"] >= found["rss_gib"] * 0.99
        assert found["threads"] == told.num_threads() == 1 + THREADS
        assert found["fds"] == told.num_fds()
        child.stdin.close()


def test_what_the_allocator_has_given_out_is_told_apart_from_pages_that_it_keeps():
    before = heap_usage()["heap_gib"]
    held = [bytes(64 * 2**10) for _ in range(1024)]
    during = heap_usage()["heap_gib"]
    held.clear()
    assert during - before == pytest.approx(1 / 16, rel=0.05)
    assert heap_usage()["heap_gib"] == pytest.approx(before, abs=0.002)


def test_what_descendants_take_is_their_roles():
    before = usage(os.getpid())
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        during = usage(os.getpid())
        child.stdin.close()
    assert during["rss_gib"] - before["rss_gib"] > 64 / 1024
    assert during["fds"] - before["fds"] >= 20


def test_the_largest_of_each_kind_of_role_is_collected(tmp_path):
    for role in ("trainer-0", "trainer-1", "rollout"):
        ResourceMeter(tmp_path, role).publish()
    (tmp_path / "resources" / "engine-10.json").write_text('{"rss_gib": 2.5, "fds": 3.0, "cuda_peak_gib": 70.0}')
    (tmp_path / "resources" / "engine-2.json").write_text('{"rss_gib": 1.5, "fds": 4.0}')
    (tmp_path / "resources" / "engine-2@1.json").write_text('{"rss_gib": 2.0, "fds": 3.0}')
    found = collect(tmp_path)
    assert {name.partition("_")[0] for name in found} == {
        *("memory/trainer", "memory/rollout", "memory/engine"),
        *("process/trainer", "process/rollout", "process/engine"),
    }
    assert found["memory/engine_rss_gib"] == 2.5
    assert found["process/engine_fds"] == 4.0
    assert found["memory/engine_cuda_peak_gib"] == 70.0
    for kind in ("trainer", "rollout"):
        assert {f"memory/{kind}_rss_gib", f"memory/{kind}_peak_gib"} <= found.keys()
        assert {f"process/{kind}_fds", f"process/{kind}_threads"} <= found.keys()


def test_a_disk_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "resources").write_text("no directory")
    ResourceMeter(tmp_path, "rollout").publish()
    assert "the metrics keep its last figures" in caplog.text


def test_the_slope_is_that_of_scipy_and_a_jump_is_no_slope():
    from scipy.stats import theilslopes

    random = np.random.default_rng(0)
    x = np.arange(80)
    y = 0.3 * x + random.normal(size=80)
    y[::5] += 1000
    assert robust_slope(x, y) == pytest.approx(theilslopes(y, x).slope, rel=1e-12)
    assert robust_slope(x, np.where(x < 20, 1.0, 9.0)) == 0.0
    with pytest.raises(ValueError, match="two different places"):
        robust_slope([1.0, 1.0], [2.0, 3.0])
