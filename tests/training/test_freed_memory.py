"""What a step freed goes back to the kernel once it has spread, and not before."""

import subprocess
import sys

from slimerl.training.memory import SPREAD, FreedMemory

SPREAD_HEAP = """
import psutil
from slimerl.training.memory import FreedMemory, keep_freed_memory
keep_freed_memory()
freed = FreedMemory()
freed.after_step()
blocks = [bytearray(2000) for _ in range(100_000)]
kept = blocks[::100]
del blocks
spread = psutil.Process().memory_info().rss
freed.after_step()
print((spread - psutil.Process().memory_info().rss) / 2**20)
"""


def returns_at(resident: list[int]) -> list[int]:
    """The steps after which memory is given back, where a process holds so much after each."""
    returned: list[int] = []
    held = iter(resident)
    freed = FreedMemory(held.__next__, lambda: returned.append(len(resident) - 1 - held.__length_hint__()))
    for _ in resident:
        freed.after_step()
    return returned


def test_memory_that_stays_within_the_spread_is_kept():
    usual = 1000
    assert returns_at([usual, usual - 300, round(usual * SPREAD), usual]) == []


def test_memory_that_has_spread_is_given_back_and_measured_anew_from_the_step_after():
    assert returns_at([1000, 1020, 1040, 1200, 1220, 1240, 900, 920, 930]) == [2, 5, 8]


def test_what_lies_between_blocks_that_are_kept_goes_back_to_the_kernel():
    done = subprocess.run([sys.executable, "-c", SPREAD_HEAP], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) > 100
