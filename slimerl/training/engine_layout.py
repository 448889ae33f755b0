"""The engines' layout as the spec asks for it. Pure: needs no engine.

Flows in: `engine` of the spec, the `config.json` of the engines' checkpoint. Flows out: an `EngineLayout` and the
form in which the engines hold the model. Invariant: what the launcher passes to SGLang says the same
(`engine/launcher.py`).
"""

from collections.abc import Mapping
from typing import Any

from slimerl.resharding.families import BlockScales, Form
from slimerl.resharding.layouts import EngineLayout
from slimerl.spec import RunSpec
from slimerl.spec.schema import EngineSpec
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


def engine_config(spec: RunSpec, config: Config) -> Config:
    """The `config.json` that the engines read; `config` is the trainer's. Raises UnsupportedModel: it has none."""
    return config if spec.engine.model_path is None else read_config(spec.engine.model_path)


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
