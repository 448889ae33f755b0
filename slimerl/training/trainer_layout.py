"""The trainer's layout as the spec asks for it. Pure: needs neither Megatron nor a process group.

Flows in: the model's `config.json`, `training.parallel`, what the machine offers. Flows out: a `MegatronLayout`.
Invariant: every size of `training.parallel` is in it, so that what is planned is what Megatron builds.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slimerl.resharding.layouts import LayoutError, MegatronLayout, ModuleNames
from slimerl.resharding.stages import Stages, read_stages
from slimerl.spec.schema import ParallelSpec
from slimerl.training.capabilities import Capabilities


def grid_layout(parallel: ParallelSpec) -> MegatronLayout:
    """Who stands where, without the model."""
    return MegatronLayout(
        tensor=parallel.tensor,
        data=parallel.data,
        context=parallel.context,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
    )


def trainer_layout(config: Mapping[str, Any], parallel: ParallelSpec, capabilities: Capabilities) -> MegatronLayout:
    """The layout of this model on this grid.

    Raises:
        LayoutError: the stages do not take the model's layers; the message names the key.
    """
    stages = None if parallel.pipeline_layout is None else _stages(config, parallel, parallel.pipeline_layout)
    layers = config.get("num_hidden_layers")
    chunks = parallel.pipeline * parallel.virtual
    if stages is None and isinstance(layers, int) and layers % chunks:
        raise LayoutError(
            f"training.parallel.pipeline * virtual = {chunks} does not divide the model's num_hidden_layers = "
            f"{layers}; choose a divisor, or give uneven stages in training.parallel.pipeline_layout"
        )
    return replace(
        grid_layout(parallel),
        stage_layers=None if stages is None else stages.layers,
        prediction_stage=None if stages is None else stages.prediction,
        # GPUs multiply matrices of such widths faster
        vocabulary_multiple=128 if capabilities.cuda else 1,
        names=ModuleNames.TRANSFORMER_ENGINE if capabilities.transformer_engine else ModuleNames.LOCAL,
    )


def _stages(config: Mapping[str, Any], parallel: ParallelSpec, text: str) -> Stages:
    try:
        stages = read_stages(text, parallel.pipeline)
    except LayoutError as error:
        raise LayoutError(f"training.parallel.pipeline_layout: {error}") from None
    placed, layers = sum(map(sum, stages.layers)), config.get("num_hidden_layers")
    if placed != layers:
        raise LayoutError(
            f"training.parallel.pipeline_layout = {text!r} places {placed} layers, the model's num_hidden_layers is "
            f"{layers}; write one t for each layer"
        )
    if len(stages.layers) != parallel.virtual:
        raise LayoutError(
            f"training.parallel.pipeline_layout = {text!r} has {len(stages.layers)} chunks per stage, "
            f"training.parallel.virtual = {parallel.virtual}; make them agree"
        )
    return stages
