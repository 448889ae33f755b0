"""Environment variables that a trainer process on a GPU needs before its first CUDA call."""

import os

from slimerl.engine.nccl_settings import NCCL_SETTINGS
from slimerl.spec.schema import ParallelSpec


def gpu_environment(parallel: ParallelSpec) -> dict[str, str]:
    """What is set where nothing is set yet."""
    environment = dict(NCCL_SETTINGS)
    if parallel.tensor > 1 or parallel.context > 1:
        # Megatron starts communication just before the product that shall hide it, and counts on that order
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return environment


def set_gpu_environment(parallel: ParallelSpec) -> None:
    """For this process, from now on."""
    for name, value in gpu_environment(parallel).items():
        os.environ.setdefault(name, value)
