"""What this machine offers to training. Everything that differs between a GPU and a CPU is chosen from this value."""

import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Capabilities:
    """`transformer_engine` and `apex` count only where CUDA is present: both are CUDA libraries."""

    cuda: bool
    transformer_engine: bool = False
    apex: bool = False

    @property
    def backend(self) -> str:
        """The torch.distributed backend."""
        return "nccl" if self.cuda else "gloo"

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", local_rank) if self.cuda else torch.device("cpu")


def detect() -> Capabilities:
    """What is installed and present here. Finding a library does not import it."""
    cuda = torch.cuda.is_available()
    return Capabilities(
        cuda=cuda,
        transformer_engine=cuda and importlib.util.find_spec("transformer_engine") is not None,
        # PyPI has an unrelated package of that name; NVIDIA's has the fused weight gradient
        apex=cuda and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )
