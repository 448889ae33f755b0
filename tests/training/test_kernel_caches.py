"""What the libraries keep of each size of a pack is bounded, or a trainer grows with every step."""

import subprocess
import sys

GROWTH = """
import sys, psutil, torch
from slimerl.training.memory import bound_kernel_caches
if sys.argv[1] == "bounded":
    bound_kernel_caches()
from slimerl.training.matmul import product
weight = torch.ones(256, 128)
def grown(tokens):
    before = psutil.Process().memory_info().rss
    for count in tokens:
        product(torch.ones(count, 128), weight)
    return (psutil.Process().memory_info().rss - before) / 2**20
grown(range(1000, 1100))
print(grown(range(1100, 1300)))
"""


def mib_grown_by_200_sizes(caches: str) -> float:
    command = [sys.executable, "-c", GROWTH, caches]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


def test_new_pack_sizes_take_no_more_memory_once_the_caches_are_full():
    assert mib_grown_by_200_sizes("bounded") < 0.3 * mib_grown_by_200_sizes("unbounded")
