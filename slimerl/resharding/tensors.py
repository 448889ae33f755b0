"""The vocabulary of the room: logical tensors and where their parts lie.

A *logical tensor* is a tensor of the Hugging Face checkpoint, the one naming that trainer and engine share.
A *placement* says that one box of it lies in one box of a parameter of one rank.
Invariant: the placements of a rank tile each of its parameters: every element lies in exactly one of them,
vocabulary padding included (`PADDING`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from slimerl.resharding.boxes import Box

PADDING = ""
"""Stands for the logical tensor of elements that belong to none; they are zero."""


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor of the Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Placement:
    """Box `box` of logical tensor `tensor` lies at box `at` of the rank's parameter `parameter`.

    Both boxes have the same shape, but that `at` may have leading dimensions of one element more
    (expert 3 of `w13_weight` [experts, rows, columns] is a matrix in the checkpoint).

    Example: rank 1 of 2 holds the lower half of an 8 x 4 up-projection below its half of the gate::

        Placement("mlp.linear_fc1.weight", Box((4, 0), (8, 4)), "up_proj.weight", Box((4, 0), (8, 4)))
    """

    parameter: str
    at: Box
    tensor: str
    box: Box

    def __post_init__(self) -> None:
        at, box = self.at.shape, self.box.shape
        extra = len(at) - len(box)
        if at != box and (extra < 0 or at != (1,) * extra + box):
            raise ValueError(
                f"{self.parameter}: {self.at.shape} elements cannot hold {self.box.shape} of {self.tensor or 'padding'}"
            )

    @property
    def is_padding(self) -> bool:
        return self.tensor == PADDING

    def view_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The placed elements of the parameter, in the shape of `box`; shares its memory."""
        return parameter[self.at.slices].view(self.box.shape)

    def message(self, shape: Sequence[int] | None, granule: int | None) -> dict[str, Any]:
        """As an engine rank is told of it, to digest what lies there (`engine/inside/loader.py`).

        Args:
            shape, granule: of the whole tensor, for `digest`; None for padding.
        """
        return {
            "parameter": self.parameter,
            "at": [self.at.starts, self.at.stops],
            "tensor": self.tensor,
            "box": [self.box.starts, self.box.stops],
            "shape": shape,
            "granule": granule,
        }
