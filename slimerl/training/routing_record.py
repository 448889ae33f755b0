"""Which experts the tokens of a micro-batch are given, where a recorded choice is replayed.

Flows in: the experts that the engine reported (R3, arXiv 2510.11370), or those that the policy's first pass of a step
chose (R2, arXiv 2507.18071). Flows out: for each layer and rank the choice for the tokens that its router sees.
Invariant: a record is laid out as its pack is; it moves with the micro-batch, so that no pass can be given the record
of another one. Choices alone are kept, never the experts' weights: those come from the router, with gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slimerl.samples.sample import NO_EXPERT
from slimerl.training.training_sample import BadSample, TrainingSample

LOOKED_AT = 256
"""Tokens of a sample whose experts are compared with each other; to sort those of all takes seconds a step."""


@dataclass(frozen=True)
class RoutedShape:
    """Of a model: `layers` of the decoder, dense ones included, each with `experts_per_token` of `experts`.

    Engines report all layers; a dense one's numbers mean nothing and are not read.
    """

    layers: int
    experts_per_token: int
    experts: int
    sparse_layers: tuple[int, ...]
    """Layers that have experts, counted from 0."""


@dataclass
class RoutingRecord:
    """Of one micro-batch, as this rank computes it.

    Args:
        of_engine: [tokens of this context-parallel rank, layers, experts per token] int16, in host memory; `NO_EXPERT`
            where nothing is known, as for padding. None: the policy's first pass is replayed.
        of_first_pass: by layer, counted from 0: [tokens that this rank's router sees, experts per token] int16, once
            they are known.
        unrecorded: [sampled tokens of the pack], 1 where the engine did not tell the experts of the token before, else
            0.
    """

    of_engine: torch.Tensor | None = None
    unrecorded: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    of_first_pass: dict[int, torch.Tensor] = field(default_factory=dict)

    def engine_choice(self, layer: int, part: int, parts: int) -> torch.Tensor | None:
        """[tokens, experts per token] of the `part`-th of equal `parts` of the tokens, which sequence parallelism cuts;
        None: the engine reported nothing."""
        if self.of_engine is None:
            return None
        return self.of_engine[:, layer].chunk(parts)[part]


def checked_routing(sample: TrainingSample, shape: RoutedShape) -> np.ndarray:
    """[tokens, layers, experts per token] int16 of one sample; all `NO_EXPERT` where it has no record.

    Raises:
        BadSample: the record is one of another model.
    """
    form = (len(sample.tokens), shape.layers, shape.experts_per_token)
    if sample.routing is None:
        return np.full(form, NO_EXPERT, dtype=np.int16)
    if sample.routing.shape[1] != shape.layers * shape.experts_per_token:
        raise BadSample(
            f"sample {sample.sample_id}: {sample.routing.shape[1]} routed experts for each token, where the model has "
            f"{shape.layers} layers * {shape.experts_per_token}; do engines and trainer have the same model?"
        )
    routing = sample.routing.reshape(form)
    known = routing[:, -1, 0] != NO_EXPERT
    # a token has a row with an expert in every place, or a row of `NO_EXPERT`
    unknown = (routing < 0).reshape(len(routing), -1).sum(axis=1)
    whole = (unknown == np.where(known, 0, routing[0].size)).all()
    if not whole or routing.min() < NO_EXPERT or routing.max() >= shape.experts or _twice(routing[known], shape):
        raise BadSample(
            f"sample {sample.sample_id}: its record does not name {shape.experts_per_token} different experts of "
            f"{shape.experts} for each token and layer"
        )
    return routing


def _twice(known: np.ndarray, shape: RoutedShape) -> bool:
    """An expert stands twice in a layer of a token; a long sample is looked at here and there."""
    some = np.sort(known[:: 1 + len(known) // LOOKED_AT][:, list(shape.sparse_layers)], axis=-1)
    return bool((some[..., 1:] == some[..., :-1]).any())


def prompt_routing(routings: Sequence[np.ndarray], prompt: int) -> np.ndarray:
    """Of a prompt that several samples share and that is computed once: that of the sample that knows most of it.

    Their engines may have chosen differently (other weights, another batch), and no choice is every sample's.
    """
    return max((routing[:prompt] for routing in routings), key=lambda each: int((each[:, -1, 0] != NO_EXPERT).sum()))
