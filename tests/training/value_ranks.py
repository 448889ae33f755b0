"""What the tests of critics, reward models and DPO run on ranks."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny
import torch

from slimerl.algorithms import algorithm_of
from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec

PPO = AlgorithmSpec(name="ppo", gamma=0.98, gae_lambda=0.9, value_clip=0.01, clip_low=0.1, clip_high=0.15)
DPO = AlgorithmSpec(name="dpo", dpo_beta=0.3)
REWARD_MODEL = AlgorithmSpec(name="reward_model")


@dataclass(frozen=True)
class Models:
    """Hugging Face checkpoints: a language model, and one with a scalar head."""

    policy: Path
    scored: Path


@dataclass(frozen=True)
class Learner:
    """`built`: what is trained, by name."""

    trainer: Any
    built: dict[str, tiny.Built]
    algorithm: AlgorithmSpec

    def packs(self, step: tiny.Step, **packing: Any) -> list[list[Any]]:
        needs = algorithm_of(self.algorithm).needs
        one = next(iter(self.built.values()))
        return tiny.micro_batches(step, one, 10_000, pairs=needs.pairs, scores=needs.scores, **packing)

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: tiny.collected(built) for name, built in self.built.items()}


def learner(
    models: Models,
    parallel: ParallelSpec,
    algorithm: AlgorithmSpec,
    optimizer: OptimizerSpec,
    grid: Any = None,
    steps: int = 4,
) -> Learner:
    from slimerl.training.value_trainer import ValueTrainer

    grid = tiny.start(parallel) if grid is None else grid
    needs = algorithm_of(algorithm).needs
    built: dict[str, tiny.Built] = {}
    critic = None
    if needs.critic or needs.scores:
        name = "critic" if needs.critic else "train"
        built[name] = tiny.build(models.scored, parallel, grid=grid, scored=True)
        critic = ValueTrainer(*_parts(built[name], optimizer, steps), algorithm_of(algorithm), grid, name=name)
    if needs.scores:
        return Learner(critic, built, algorithm)
    built["policy"] = tiny.build(models.policy, parallel, grid=grid)
    return Learner(tiny.trainer(built["policy"], algorithm, optimizer, steps, critic=critic), built, algorithm)


def _parts(built: tiny.Built, optimizer: OptimizerSpec, steps: int) -> tuple[Any, Any, Any]:
    from slimerl.training.model import wrap_for_training
    from slimerl.training.optimizer import build_optimizer, build_schedule

    chunks = wrap_for_training(built.chunks, built.config)
    adam = build_optimizer(optimizer, chunks, built.config.params_dtype)
    return chunks, adam, build_schedule(optimizer, steps, adam)


def train(
    models: Models, parallel: ParallelSpec, algorithms: list[AlgorithmSpec], optimizer: OptimizerSpec, packing: dict
) -> list[Any]:
    """For each algorithm: the figures of each step and the weights afterwards."""
    grid, found = tiny.start(parallel), []
    for algorithm in algorithms:
        one = learner(models, parallel, algorithm, optimizer, grid)
        figures = [one.trainer.step(one.packs(step, **packing)) for step in steps_of(algorithm)]
        found.append((figures, one.weights()))
    return found


def steps_of(algorithm: AlgorithmSpec) -> list[tiny.Step]:
    group = 2 if algorithm_of(algorithm).needs.pairs else 4
    steps = [tiny.random_step(seed, samples=8, longest=12, group=group) for seed in (11, 12)]
    return [_with_margins(step) for step in steps] if algorithm_of(algorithm).needs.scores else steps


def _with_margins(step: tiny.Step) -> tiny.Step:
    """Of each pair another; what stands at a rejected answer is not read."""
    return replace(step, samples=[replace(each, margin=number / 4) for number, each in enumerate(step.samples)])


def scores_and_export(model: Path, out: Path, parallel: ParallelSpec) -> list[list[float]]:
    """What each sampled token of a step is scored with, sample by sample; the model is exported to `out`."""
    from slimerl.training.batches import PackForm, pack
    from slimerl.training.weights import export_weights

    built = tiny.build(model, parallel, scored=True)
    step = tiny.random_step(3, samples=4)
    batch = pack(step.samples, 1.0, PackForm(scores=True, shared_prefix=True))
    with torch.no_grad():
        values = built.chunks[0](batch.tokens, None, None, labels=batch.wanted, packed_seq_params=batch.packed)
    export_weights(built.chunks, out, model, built.map, built.grid)
    return [values[batch.sequence == each].tolist() for each in range(batch.sequences)]


def critic_resumed(
    models: Models, root: Path, parallel: ParallelSpec, warmup: int, saved_after: int, near: bool
) -> list[Any]:
    """(weights at a checkpoint and after one more step), and the same once another process has loaded it. Args: `near`:
    a local checkpoint."""
    import checkpoint_ranks

    from slimerl.training.checkpoint.content import TrainedState
    from slimerl.training.fused_adam import begin_state

    algorithm = PPO.model_copy(update={"value_warmup_steps": warmup})
    optimizer = OptimizerSpec(lr=1e-2, warmup_steps=2, decay="cosine")
    grid = tiny.start(parallel)

    def fresh() -> tuple[Learner, Any]:
        one = learner(models, parallel, algorithm, optimizer, grid)
        policy, critic = one.trainer, one.trainer._critic
        begin_state(policy._optimizer)
        state = TrainedState(critic.chunks, critic._optimizer, critic._schedule)
        return one, TrainedState(policy.chunks, policy._optimizer, policy._schedule, state)

    steps = [tiny.random_step(seed, samples=4) for seed in range(saved_after + 1)]
    one, state = fresh()
    for step in steps[:-1]:
        one.trainer.step(one.packs(step))
    saved = one.weights()
    (checkpoint_ranks.save_locally if near else checkpoint_ranks.save)(state, root, saved_after, grid)
    figures = one.trainer.step(one.packs(steps[-1]))
    other, state = fresh()
    warmed = min(saved_after, warmup)
    if near:
        checkpoint_ranks.load_locally(state, root, saved_after, grid, warmed)
    else:
        state.load(root / f"step-{saved_after}", saved_after, True, warmed)
    loaded = other.weights()
    figures_again = other.trainer.step(other.packs(steps[-1]))
    return [(saved, one.weights(), figures), (loaded, other.weights(), figures_again)]
