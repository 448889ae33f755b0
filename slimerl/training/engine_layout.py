"""The engines' layout as the spec asks for it. Pure: needs no engine.

Flows in: `engine` of the spec, the `config.json` of the engines' checkpoint. Flows out: an `EngineLayout` and the
form in which the engines hold the model. Invariant: what the launcher passes to SGLang says the same
(`engine/launcher.py`).
"""

from collections.abc import Mapping
from typing import Any

from slimerl.resharding.families import BlockScales, Form
from slimerl.resharding.layouts import EngineLayout
from slimerl.resharding.planner import Topology
from slimerl.spec import RunSpec
from slimerl.spec.engine import EngineSpec
from slimerl.training.model_config import model_arguments, read_config

Config = Mapping[str, Any]


def engine_layout(engine: EngineSpec) -> EngineLayout:
    """Of one engine."""
    return EngineLayout(
        tensor=engine.tensor_parallel,
        expert=engine.expert_parallel,
        data_attention=engine.data_parallel_attention,
        replicated_dense=engine.replicated_mlp,
        replicated_shared=engine.replicated_mlp,
    )


def sync_topology(trainer_ranks: int, engine: EngineLayout, engines: int, gpus_per_node: int) -> Topology:
    """The machines of a sync. Engines that do not fill nodes evenly are planned as nodes of their own.

    Raises LayoutError: a size is none.
    """
    small, large = sorted((gpus_per_node, engine.world_size))
    per_node = engine.world_size if small < 1 or large % small else gpus_per_node
    return Topology(trainer_ranks, engine.world_size, engines, per_node)


def engine_config(spec: RunSpec, config: Config) -> Config:
    """The `config.json` that the engines read; `config` is the trainer's. Raises UnsupportedModel: it has none."""
    own = spec.engine.model_path if spec.uses_engines else None
    return config if own is None else read_config(own)


def engine_form(config: Config) -> Form:
    """Which tensors the engines hold, and how stored. `config`: theirs. Raises ConfigError for an unknown format."""
    return Form(scales=BlockScales.of(config))


def differences(config: Config, served: Config) -> list[str]:
    """In what the models of two `config.json` differ, but for how numbers are stored: Megatron's names.

    Raises UnsupportedModel: one of them is no model that can be built.
    """
    plain = {key: value for key, value in served.items() if key != "quantization_config"}
    ours, theirs = (vars(made) | dict(made.transformer) for made in map(model_arguments, (config, plain)))
    keys = sorted((ours.keys() | theirs.keys()) - {"transformer"})
    return [key for key in keys if ours.get(key) != theirs.get(key)]
