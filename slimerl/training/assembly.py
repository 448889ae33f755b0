"""Puts the trainer's parts together, from a spec.

Flows in: the spec, this rank's grid and machine. Flows out: a `Policy` (model, optimizer, what exports it), and the
source and syncer of its algorithm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slimerl.algorithms import Algorithm, algorithm_of
from slimerl.resharding.layouts import LayoutError
from slimerl.spec import RunSpec
from slimerl.training.batching import Batching, build_batching
from slimerl.training.capabilities import Capabilities
from slimerl.training.checkpoint.content import TrainedState
from slimerl.training.checkpoint.start import load_megatron_weights
from slimerl.training.loop import NoEngines, Syncer
from slimerl.training.model import build_chunks, wrap_for_training
from slimerl.training.model_config import (
    ModelArguments,
    UnsupportedModel,
    model_arguments,
    read_config,
    transformer_config,
)
from slimerl.training.needs import unroutable, unsupplied
from slimerl.training.optimizer import build_optimizer, build_schedule
from slimerl.training.parallel import Grid, broadcast_bytes
from slimerl.training.rollout_client import RolloutClient
from slimerl.training.rollout_source import RolloutSource
from slimerl.training.routing_replay import RoutingReplay
from slimerl.training.sft_data import RowSource
from slimerl.training.sft_rows import load_tokenizer, read_samples
from slimerl.training.source import Source
from slimerl.training.step import PolicyTrainer
from slimerl.training.stragglers import RankTimes
from slimerl.training.teacher import load_teacher
from slimerl.training.weights import ModelMap, export_weights, load_weights, model_map

if TYPE_CHECKING:
    from slimerl.training.colocated import ColocatedSyncer


@dataclass(frozen=True)
class Policy:
    """The model under training on this rank."""

    trainer: PolicyTrainer
    state: TrainedState
    chunks: Sequence[torch.nn.Module]
    arguments: ModelArguments
    algorithm: Algorithm
    map: ModelMap
    grid: Grid
    batching: Batching
    source: Path
    """The checkpoint that it was loaded from."""

    def export(self, destination: Path) -> None:
        """Write it as a Hugging Face checkpoint; called on every rank."""
        export_weights(self.chunks, destination, self.source, self.map, self.grid)


def build_policy(spec: RunSpec, grid: Grid, capabilities: Capabilities) -> Policy:
    """Build, load and wrap the model.

    Raises:
        UnsupportedModel: the checkpoint's `config.json` asks for what cannot be built.
        CheckpointError: its tensors are not the ones that `config.json` asks for.
    """
    if spec.export_dir.resolve() == spec.model.path.resolve():
        raise UnsupportedModel(f"training.export_path {spec.export_dir} is model.path: the export would replace it")
    if lacking := unsupplied(spec.algorithm):
        raise UnsupportedModel("\n".join(lacking))
    hf_config = read_config(spec.model.path)
    arguments = model_arguments(hf_config)
    if lacking := unroutable(spec.algorithm, arguments):
        raise UnsupportedModel("\n".join(lacking))
    replay = spec.algorithm.routing_replay
    capabilities = capabilities.for_dtype(spec.model.dtype).sharing_prompts(spec.training.shared_prefix)
    config = transformer_config(
        *(arguments, spec.training.parallel, spec.model.dtype, capabilities, spec.training.recompute),
        replays_routing=replay != "none",
    )
    where = model_map(hf_config, spec.training.parallel, capabilities)
    bare = build_chunks(arguments, config, capabilities, where.vocabulary_rows(arguments.vocab_size))
    if spec.model.megatron_path is None:
        load_weights(bare, spec.model.path, where, grid.rank)
    else:
        load_megatron_weights(bare, spec.model.megatron_path, spec.model.path, hf_config, grid)
    replicas = spec.training.parallel.data * spec.training.parallel.context
    chunks = wrap_for_training(bare, config, capabilities.overlaps_reduction(replicas))
    # after loading: the optimizer copies the weights
    optimizer = build_optimizer(spec.training.optimizer, chunks, config.params_dtype)
    schedule = build_schedule(spec.training.optimizer, spec.training.steps, optimizer)
    algorithm = algorithm_of(spec.algorithm)
    refresh_steps = spec.algorithm.reference_refresh_steps
    routing = RoutingReplay(chunks, replay)
    trainer = PolicyTrainer(chunks, optimizer, schedule, algorithm, grid, refresh_steps, routing)
    if spec.algorithm.teacher_path is not None:
        trainer.teacher = load_teacher(spec.algorithm.teacher_path, spec.model.path, chunks, where, grid.rank)
    batching = build_batching(spec, grid, capabilities, arguments)
    state = TrainedState(chunks, optimizer, schedule)
    return Policy(trainer, state, chunks, arguments, algorithm, where, grid, batching, spec.model.path)


def rank_comparison(policy: Policy) -> Callable[[Mapping[str, float]], Mapping[str, float]]:
    """From this rank's figures of a step, which rank the others wait for; called on every rank."""
    times = RankTimes(("compute", "fetch"), policy.grid.device)
    return lambda figures: times.compare({"compute": policy.trainer.compute_s, "fetch": figures.get("time/fetch", 0.0)})


def shares_gpus(spec: RunSpec, capabilities: Capabilities) -> bool:
    """Trainer and engines take turns in the memory of the same GPUs."""
    return spec.takes_turns(capabilities.cuda)


def with_engines(spec: RunSpec, policy: Policy, client: RolloutClient | None) -> tuple[Source, Syncer]:
    """For algorithms that sample; `client` on the leaders of replicas."""
    # the engine's client library is not needed for supervised fine-tuning
    from slimerl.training.weight_sync import build_syncer

    syncer = build_syncer(spec, policy.chunks, policy.map, policy.grid, client)
    return RolloutSource(spec, policy.grid, policy.algorithm, policy.batching, client), syncer


def repeated(policy: Policy, syncer: Syncer, client: RolloutClient | None) -> Syncer:
    """In place of that syncer: tried again where its engines ended and come back. Called on every rank."""
    from slimerl.training.repeated_sync import RepeatedSync

    grid = policy.grid

    def agree(value: bool) -> bool:
        return broadcast_bytes(b"\1" if value else b"\0", grid, source=0) == b"\1"

    return RepeatedSync(syncer, client.status if client is not None and grid.is_first else None, agree)


def in_turns(spec: RunSpec, policy: Policy, syncer: Syncer) -> "ColocatedSyncer":
    """In place of that syncer where the engines share the trainer's GPUs; called on every rank.

    Raises LayoutError: `shards` links GPUs, one to each member.
    """
    from slimerl.resharding.sync import WeightSyncer
    from slimerl.training.colocated import ColocatedSyncer
    from slimerl.training.hand_over import TrainerParts, share_problems

    if not isinstance(syncer, WeightSyncer):
        raise LayoutError(
            "sync.transport: shards needs engines on GPUs of their own; set cluster.placement: disaggregated, or "
            "sync.transport: ipc"
        )
    parts = TrainerParts(policy.chunks, policy.state.optimizer)
    lease_s = spec.deadlines.batch_s + spec.deadlines.sync_s
    return ColocatedSyncer(syncer, parts, share_problems, lease_s, policy.grid.is_first)


def without_engines(spec: RunSpec, policy: Policy) -> tuple[Source, Syncer]:
    """For supervised fine-tuning. Raises DataError."""
    tokenizer = load_tokenizer(spec.model.path, spec.data)
    longest = policy.arguments.max_sequence_tokens
    train = read_samples(spec.data.train_path, tokenizer, spec.data, longest)
    held_out = read_samples(spec.data.eval_path, tokenizer, spec.data, longest) if spec.data.eval_path else []
    return RowSource(spec, policy.grid, policy.batching, train, held_out), NoEngines()
