"""The critic: a model of its own with a scalar head, in the same ranks and the same layout as the policy.

Flows in: the spec, this rank's grid and machine. Flows out: a `Critic`, which the policy's step asks for values and
teaches. Invariant: it has weights, optimizer and schedule of its own; nothing of the policy's is touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimerl.algorithms import Algorithm
from slimerl.resharding.families.family import PLAIN, SCORED, Form
from slimerl.spec import RunSpec
from slimerl.training.capabilities import Capabilities
from slimerl.training.checkpoint.content import TrainedState
from slimerl.training.model import PolicyModel, build_chunks, wrap_for_training
from slimerl.training.model_config import (
    ModelArguments,
    UnsupportedModel,
    model_arguments,
    read_config,
    transformer_config,
)
from slimerl.training.needs import unroutable
from slimerl.training.optimizer import build_optimizer, build_schedule
from slimerl.training.parallel import Grid
from slimerl.training.value_model import ValueModel
from slimerl.training.value_trainer import ValueTrainer
from slimerl.training.weights import ModelMap, load_weights, model_map


@dataclass(frozen=True)
class BareModel:
    """A model on this rank, not yet wrapped for training. `config`: Megatron's."""

    chunks: list[torch.nn.Module]
    arguments: ModelArguments
    config: Any
    map: ModelMap


def bare_model(path: Path, spec: RunSpec, capabilities: Capabilities, form: Form = PLAIN) -> BareModel:
    """Build the model of a checkpoint's `config.json`; its weights are to be loaded.

    Args:
        capabilities: as of the spec's dtype and sharing of prompts.

    Raises:
        UnsupportedModel: the `config.json` asks for what cannot be built.
    """
    training = spec.training
    hf_config = read_config(path)
    arguments = model_arguments(hf_config)
    replays = spec.algorithm.routing_replay != "none" and not form.score
    if replays and (lacking := unroutable(spec.algorithm, arguments)):
        raise UnsupportedModel("\n".join(lacking))
    config = transformer_config(
        *(arguments, training.parallel, spec.model.dtype, capabilities, training.recompute), replays_routing=replays
    )
    where = model_map(hf_config, training.parallel, capabilities, form)
    kind = ValueModel if form.score else PolicyModel
    chunks = build_chunks(arguments, config, capabilities, where.vocabulary_rows(arguments.vocab_size), kind)
    return BareModel(chunks, arguments, config, where)


@dataclass(frozen=True)
class Critic:
    trainer: ValueTrainer
    state: TrainedState
    chunks: Sequence[torch.nn.Module]
    map: ModelMap


def build_critic(path: Path, spec: RunSpec, grid: Grid, capabilities: Capabilities, algorithm: Algorithm) -> Critic:
    """Build, load and wrap it; called on every rank. Raises as `assembly.build_policy`."""
    bare = bare_model(path, spec, capabilities, SCORED)
    load_weights(bare.chunks, path, bare.map, grid.rank)
    replicas = spec.training.parallel.data * spec.training.parallel.context
    chunks = wrap_for_training(bare.chunks, bare.config, capabilities.overlaps_reduction(replicas))
    optimizer = build_optimizer(spec.critic_optimizer, chunks, bare.config.params_dtype)
    schedule = build_schedule(spec.critic_optimizer, spec.training.steps, optimizer)
    trainer = ValueTrainer(chunks, optimizer, schedule, algorithm, grid, name="critic")
    return Critic(trainer, TrainedState(chunks, optimizer, schedule), chunks, bare.map)
