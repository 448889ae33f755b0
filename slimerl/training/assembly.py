"""Puts the trainer's parts together, from a spec.

Flows in: the spec, this rank's grid and machine. Flows out: a `Policy` (model, optimizer, what exports it), and the
source and syncer of its algorithm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from slimerl.algorithms import Algorithm, algorithm_of
from slimerl.resharding.families.family import PLAIN, SCORED
from slimerl.resharding.layouts import LayoutError
from slimerl.spec import RunSpec
from slimerl.training.batching import Batching, build_batching
from slimerl.training.capabilities import Capabilities
from slimerl.training.checkpoint.content import TrainedState
from slimerl.training.checkpoint.start import load_megatron_weights
from slimerl.training.critic import bare_model, build_critic
from slimerl.training.fused_adam import begin_state
from slimerl.training.loop import NoEngines, Syncer
from slimerl.training.model import dismantle, wrap_for_training
from slimerl.training.model_config import ModelArguments, UnsupportedModel
from slimerl.training.needs import unsupplied
from slimerl.training.optimizer import build_optimizer, build_schedule
from slimerl.training.parallel import Grid, broadcast_bytes
from slimerl.training.preference_data import PairSource
from slimerl.training.preference_rows import read_pairs
from slimerl.training.rollout_client import RolloutClient
from slimerl.training.rollout_source import RolloutSource
from slimerl.training.routing_replay import RoutingReplay
from slimerl.training.sft_data import SampleSource
from slimerl.training.sft_rows import load_tokenizer, read_samples
from slimerl.training.source import Source
from slimerl.training.step import PolicyTrainer
from slimerl.training.stragglers import RankTimes
from slimerl.training.teacher import load_teacher
from slimerl.training.value_trainer import ValueTrainer
from slimerl.training.weights import ModelMap, export_weights, load_weights

if TYPE_CHECKING:
    from slimerl.training.colocated import ColocatedSyncer

Kind = TypeVar("Kind")


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

    def let_go(self) -> None:
        """It trains no more, and its memory is to be free."""
        for state in self.state.all:
            dismantle(state.chunks)

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
    algorithm = algorithm_of(spec.algorithm)
    capabilities = capabilities.for_dtype(spec.model.dtype).sharing_prompts(spec.training.shared_prefix)
    bare = bare_model(spec.model.path, spec, capabilities, SCORED if algorithm.needs.scores else PLAIN)
    if spec.model.megatron_path is None:
        load_weights(bare.chunks, spec.model.path, bare.map, grid.rank)
    else:
        load_megatron_weights(bare.chunks, spec.model.megatron_path, spec.model.path, bare.map.config, grid)
    replicas = spec.training.parallel.data * spec.training.parallel.context
    chunks = wrap_for_training(bare.chunks, bare.config, capabilities.overlaps_reduction(replicas))
    # after loading: the optimizer copies the weights
    optimizer = build_optimizer(spec.training.optimizer, chunks, bare.config.params_dtype)
    schedule = build_schedule(spec.training.optimizer, spec.training.steps, optimizer)
    path, critic = spec.critic_path, None
    if path is not None:
        critic = build_critic(path, spec, grid, capabilities, algorithm)
        if spec.algorithm.value_warmup_steps:
            begin_state(optimizer)
    if algorithm.needs.scores:
        trainer: PolicyTrainer = ValueTrainer(chunks, optimizer, schedule, algorithm, grid)
    else:
        refresh_steps = spec.algorithm.reference_refresh_steps
        routing = RoutingReplay(chunks, spec.algorithm.routing_replay)
        taught = None if critic is None else critic.trainer
        trainer = PolicyTrainer(chunks, optimizer, schedule, algorithm, grid, refresh_steps, routing, critic=taught)
        if spec.algorithm.teacher_path is not None:
            trainer.teacher = load_teacher(spec.algorithm.teacher_path, spec.model.path, chunks, bare.map, grid.rank)
    batching = build_batching(spec, grid, capabilities, bare.arguments, algorithm.needs)
    state = TrainedState(chunks, optimizer, schedule, None if critic is None else critic.state)
    return Policy(trainer, state, chunks, bare.arguments, algorithm, bare.map, grid, batching, spec.model.path)


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
    states = policy.state.all
    chunks = [chunk for state in states for chunk in state.chunks]
    parts = TrainerParts(chunks, *(state.optimizer for state in states))
    lease_s = spec.deadlines.batch_s + spec.deadlines.sync_s
    return ColocatedSyncer(syncer, parts, share_problems, lease_s, policy.grid.is_first)


def without_engines(spec: RunSpec, policy: Policy) -> tuple[Source, Syncer]:
    """For what is trained on given answers. Raises DataError."""
    tokenizer = load_tokenizer(spec.model.path, spec.data)

    def rows(read: Callable[..., list[Kind]]) -> tuple[list[Kind], list[Kind]]:
        """(of training, held out)"""
        given = (spec.data.train_path, spec.data.eval_path)
        longest = policy.arguments.max_sequence_tokens
        train, held_out = (read(path, tokenizer, spec.data, longest) if path else [] for path in given)
        return train, held_out

    if policy.algorithm.needs.pairs:
        return PairSource(spec, policy.grid, policy.batching, *rows(read_pairs)), NoEngines()
    return SampleSource(spec, policy.grid, policy.batching, *rows(read_samples)), NoEngines()
