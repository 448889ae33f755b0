"""What the libraries keep of each size of a pack or batch is bounded, or trainers and engines grow with every step."""

import subprocess
import sys

import pytest

GROWTH = """
import os, sys, psutil
from slimerl.resilience.kernel_caches import bounded_kernel_caches
if sys.argv[1] == "bounded":
    os.environ.update(bounded_kernel_caches())
import torch
from slimerl.engine.inside.invariant_linear import LARGE, linear
from slimerl.training.matmul import product
product = {"trainer": product, "engine": linear}[sys.argv[2]]
weight = torch.ones(LARGE // 128, 128)
def grown(tokens):
    before = psutil.Process().memory_info().rss
    for count in tokens:
        product(torch.ones(count, 128), weight)
    return (psutil.Process().memory_info().rss - before) / 2**20
grown(range(1000, 1100))
print(grown(range(1100, 1300)))
"""


def mib_grown_by_200_sizes(caches: str, role: str) -> float:
    command = [sys.executable, "-c", GROWTH, caches, role]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


@pytest.mark.parametrize("role", ["trainer", "engine"])
def test_new_sizes_take_no_more_memory_once_the_caches_are_full(role):
    assert mib_grown_by_200_sizes("bounded", role) < 0.3 * mib_grown_by_200_sizes("unbounded", role)
