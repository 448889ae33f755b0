"""Training steps of tiny models on a machine of any kind; what runs on ranks or on a GPU is defined here."""

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny
import torch

from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec

STEPS = 3
ALGORITHM = AlgorithmSpec(correction="token_tis")
OPTIMIZER = OptimizerSpec(lr=1e-3, weight_decay=0.01)


@dataclass(frozen=True)
class Variant:
    """How a model is trained; none of it may change what comes out."""

    dtype: str = "fp32"
    recompute: str = "none"
    overlap: bool = False
    transformer_engine: bool = True
    """Where it is present."""


@dataclass(frozen=True)
class Machine:
    """A model ready for training, and what it needs."""

    built: tiny.Built
    trainer: Any
    optimizer: Any
    segmented: bool

    def packs(self, seed: int) -> list[list[Any]]:
        """The micro-batches of one step, in their minibatch."""
        from slimerl.training.batches import PackForm, pack

        form = PackForm(self.built.grid.sizes.tensor, segmented=self.segmented, device=self.built.grid.device)
        samples = tiny.random_step(seed).samples[self.built.grid.place.data :: self.built.grid.sizes.data]
        half = len(samples) // 2
        return [[pack(part, 1.0, form) for part in (samples[:half], samples[half:])]]


def prepare(model_path: Path, parallel: ParallelSpec, variant: Variant) -> Machine:
    import megatron_patches

    megatron_patches.apply()
    from slimerl.algorithms import algorithm_of
    from slimerl.training import capabilities, model, model_config, weights
    from slimerl.training import parallel as grids
    from slimerl.training.optimizer import build_optimizer, build_schedule
    from slimerl.training.step import PolicyTrainer

    here = capabilities.detect().for_dtype(variant.dtype)
    if not variant.transformer_engine:
        here = replace(here, transformer_engine=False)
    grid = grids.start(parallel, here, here.device(0), timeout_s=60, seed=1)
    hf = model_config.read_config(model_path)
    arguments = model_config.model_arguments(hf)
    config = model_config.transformer_config(arguments, parallel, variant.dtype, here, variant.recompute)
    where = weights.model_map(hf, parallel, here)
    bare = model.build_chunks(arguments, config, here, where.vocabulary_rows(arguments.vocab_size))
    weights.load_weights(bare, model_path, where, grid.rank)
    chunks = model.wrap_for_training(bare, config, variant.overlap)
    optimizer = build_optimizer(OPTIMIZER, chunks, config.params_dtype)
    trainer = PolicyTrainer(
        chunks, optimizer, build_schedule(OPTIMIZER, STEPS, optimizer), algorithm_of(ALGORITHM), grid
    )
    return Machine(tiny.Built(grid, bare, where, config), trainer, optimizer, not here.transformer_engine)


def train(
    model_path: Path, parallel: ParallelSpec, variant: Variant, steps: int = STEPS
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """(figures of each step, the weights afterwards in host memory under Hugging Face names)."""
    machine = prepare(model_path, parallel, variant)
    figures = [machine.trainer.step(machine.packs(seed)) for seed in range(steps)]
    return figures, weights_of(machine)


@dataclass(frozen=True)
class Report:
    """What one variant gave: classes of the model's modules and of its Adam, log-probabilities before the first step,
    and then as `train`."""

    modules: set[str]
    adam: str
    logprobs: torch.Tensor
    figures: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def reports(cases: Sequence[tuple[Path, Variant]]) -> list[Report | str]:
    """Several models and variants in one process, each from the start: a process costs more than the steps of a tiny
    model. Of one that raised, its traceback."""
    from megatron.core import parallel_state

    found: list[Report | str] = []
    for path, variant in cases:
        environment = dict(os.environ)  # Megatron fixes the attention kernel there, once
        try:
            found.append(_report(path, variant))
        except Exception:  # noqa: BLE001 (told to the test of this variant)
            found.append(traceback.format_exc())
        os.environ.clear()
        os.environ.update(environment)
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
    return found


def _report(model_path: Path, variant: Variant) -> Report:
    from slimerl.training.fused_adam import inner_optimizers

    machine = prepare(model_path, ParallelSpec(), variant)
    [inner, *_] = inner_optimizers(machine.optimizer)
    logprobs = torch.cat(machine.trainer.logprobs(machine.packs(0)[0])).float().cpu()
    figures = [machine.trainer.step(machine.packs(seed)) for seed in range(STEPS)]
    return Report(
        modules={type(module).__name__ for module in machine.built.chunks[0].modules()},
        adam=f"{type(inner).__module__}.{type(inner).__name__}",
        logprobs=logprobs,
        figures=figures,
        weights=weights_of(machine),
    )


def weights_of(machine: Machine) -> dict[str, torch.Tensor]:
    from slimerl.resharding.assemble import collect
    from slimerl.training.weights import named_parameters

    built = machine.built
    parameters = {name: value.detach().cpu() for name, value in named_parameters(built.chunks).items()}
    dtype = next(iter(parameters.values())).dtype
    out = {tensor.name: torch.zeros(tensor.shape, dtype=dtype) for tensor in built.map.logical_tensors(dtype)}
    collect(built.map.placements(built.grid.rank), parameters, out, cast=True)
    return out
