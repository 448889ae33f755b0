"""What this machine offers to training. Everything that differs between a GPU and a CPU is chosen from this value."""

import importlib.util
from dataclasses import dataclass, replace
from typing import Self

import torch


@dataclass(frozen=True)
class Capabilities:
    """`transformer_engine` and `apex` count only where CUDA is present: both are CUDA libraries."""

    cuda: bool
    transformer_engine: bool = False
    apex: bool = False
    """NVIDIA's apex, built with its CUDA extensions."""
    own_attention: bool = False
    """This package's attention stands in place of Transformer Engine's, so that prompts can be shared."""

    @property
    def backend(self) -> str:
        """The torch.distributed backend."""
        return "nccl" if self.cuda else "gloo"

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", local_rank) if self.cuda else torch.device("cpu")

    def for_dtype(self, dtype: str) -> Self:
        """What counts for a model of this dtype ("fp32" or "bf16"): in float32 Transformer Engine has no attention
        for packed sequences (its fused kernels take 16 bits, its plain one no packs), so it is left out as a whole."""
        return replace(self, transformer_engine=False) if dtype == "fp32" else self

    def sharing_prompts(self, wish: str) -> Self:
        """`training.shared_prefix` on this machine: "auto" shares prompts where this package's attention is used
        anyway, "always" uses it everywhere."""
        return replace(self, own_attention=wish == "always")

    @property
    def segmented(self) -> bool:
        """Packs are made for this package's attention, not for Transformer Engine's."""
        return self.own_attention or not self.transformer_engine

    def overlaps_reduction(self, replicas: int) -> bool:
        """Whether gradients are reduced while the backward pass goes on; on a CPU both would want the same cores."""
        return self.cuda and replicas > 1

    @property
    def fuses_weight_gradients(self) -> bool:
        """Matrix products that add onto float32 gradients. Transformer Engine's layers have their own, but Megatron's
        output layer, which is never Transformer Engine's, refuses the switch without apex."""
        return self.apex


def detect() -> Capabilities:
    """What is installed and present here. Finding a library does not import it."""
    cuda = torch.cuda.is_available()
    return Capabilities(
        cuda=cuda,
        transformer_engine=cuda and importlib.util.find_spec("transformer_engine") is not None,
        # PyPI has an unrelated package of that name; NVIDIA's has the fused weight gradient
        apex=cuda and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )
