"""The form of a family's table: which weights exist, and which rule makes each parameter of either side from them.

Flows in: nothing; these are plain values that `blocks.py` and the families write down. Invariant: every weight of a
table is the source of a rule on both sides.

Names are templates: `{layer}` is the layer's number (the rank's own number on Megatron's side), `{expert}` likewise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from slimerl.resharding.families.cuts import Cut
from slimerl.resharding.layouts import Axis, EngineLayout, ExpertLocation, LayoutError

DRAFT = "draft."
"""What stands before the parameters of an engine's draft model, to tell them from those of the model itself."""


@dataclass(frozen=True)
class Weight:
    """A logical tensor of a layer, or of the model; with `experts`, one for each of that many experts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """Of the engine, and so on the way to it; None: the model's."""
    experts: int = 0
    quantised: bool = False
    """Stored in FP8 with block scales by an engine whose model is quantised (`scales.py`)."""
    widened: bool = False
    """`dtype` is the engine's alone; checkpoints have the weight in the model's."""


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
    """Only where the pipeline stage is not the first: a copy of the embedding (tied head, multi-token prediction)."""
    after_layers: bool = False
    """Megatron's final norm: with multi-token prediction it stands where the last layer is, not where the head is."""
    location: ExpertLocation = ExpertLocation.FIXED
    """Of the engine's experts."""
    behind: bool = False
    """Not the rank's experts, but the slice behind them: a shared expert, fused with the routed ones."""
    fused: "Rule | None" = None
    """The rule in place of this one where an engine fuses shared experts (`EngineLayout.fused_shared_experts`)."""


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
    prediction: Block | None = None
    """The multi-token-prediction layer: on Megatron's side a part of the model, on the engine's a draft model, whose
    parameters start with `DRAFT`. Left out unless a `Form` asks for it; its names are no templates but for `{expert}`.
    """
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second copies that checkpoints carry: name -> the tensor that it repeats."""
    unplanned: Mapping[str, str] = field(default_factory=dict)
    """Sizes of an `EngineLayout` that must be 1, since SGLang's model of the family cuts in a way of its own: why."""

    @property
    def tied(self) -> bool:
        """The head is the embedding: the table has no weight of its own for it."""
        return not any(weight.name == "lm_head.weight" for weight in self.last.weights)

    def check_engine(self, layout: EngineLayout) -> None:
        """Raises LayoutError where SGLang's model would not be cut as the rules say."""
        of_pipelines = {
            "the stages of a tied model each hold the embedding in their own way": self.tied,
            "the draft model of a pipeline (multi-token prediction) stands on stages of its own": bool(self.prediction),
        }
        why_not = [("pipeline", why) for why, holds in of_pipelines.items() if holds] + list(self.unplanned.items())
        for size, why in why_not:
            if getattr(layout, size) > 1:
                raise LayoutError(f"an engine with {size} = {getattr(layout, size)} is not planned: {why}; set it to 1")
