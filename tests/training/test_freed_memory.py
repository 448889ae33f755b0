"""Memory that the allocator keeps between steps goes back to the system from time to time."""

import subprocess
import sys

HOLES = """
import psutil, torch
from slimerl.training.memory import STEPS_BETWEEN_RETURNS, keep_freed_memory, return_freed_memory
keep_freed_memory()
kept = [torch.ones(2**20) for _ in range(100)]
kept[::2] = [None] * 50
held = psutil.Process().memory_info().rss
return_freed_memory(1)
between = psutil.Process().memory_info().rss
return_freed_memory(STEPS_BETWEEN_RETURNS)
print((held - between) // 2**20, (held - psutil.Process().memory_info().rss) // 2**20)
"""


def test_holes_between_what_is_kept_go_back_every_few_steps():
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=120, check=True)
    between, returned = map(int, done.stdout.split())
    assert between < 10
    assert returned > 180, "fifty tensors of 4 MiB each"
