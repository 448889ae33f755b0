"""The form of a family's table: which weights exist, and which rule makes each parameter of either side from them.

Flows in: nothing; these are plain values that `blocks.py` and the families write down. Invariant: every weight of a
table is the source of a rule on both sides.

Names are templates: `{layer}` is the layer's number (the rank's own number on Megatron's side), `{expert}` likewise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slimerl.resharding.families.cuts import Cut
from slimerl.resharding.layouts import Axis


@dataclass(frozen=True)
class Weight:
    """A logical tensor of a layer, or of the model; with `experts`, one for each of that many experts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None: the model's."""
    experts: int = 0


@dataclass(frozen=True)
class Rule:
    """Parameter `parameter` holds the rank's part of the `sources`, cut as `cut` says along `axis`.

    With `experts`, there is a source (and a parameter, or with `stacked` a slice of the first dimension) for each
    expert that the rank holds.
    """

    parameter: str
    sources: tuple[str, ...]
    cut: Cut
    axis: Axis
    transformer_engine: str | None = None
    """The name under Megatron's Transformer-Engine specification, where that is another one."""
    experts: int = 0
    stacked: bool = False
    only_apart: bool = False
    """Only where the last pipeline stage is not also the first: the copy of a tied embedding."""


@dataclass(frozen=True)
class Block:
    """A group of weights with their rules on both sides; blocks add up."""

    weights: tuple[Weight, ...] = ()
    megatron: tuple[Rule, ...] = ()
    engine: tuple[Rule, ...] = ()

    def __add__(self, other: "Block") -> "Block":
        return Block(self.weights + other.weights, self.megatron + other.megatron, self.engine + other.engine)


@dataclass(frozen=True)
class Table:
    """A model: what comes before the layers, one block per layer (equal layers share theirs), what comes after."""

    first: Block
    layers: Sequence[Block]
    last: Block
