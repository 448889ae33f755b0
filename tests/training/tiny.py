"""Tiny models and steps for the tests of this room; what runs on ranks is defined here, so that it can be pickled."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slimerl.algorithms import algorithm_of
from slimerl.resharding.assemble import collect
from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec
from slimerl.training.training_sample import TrainingSample

VOCABULARY = 130
"""Not a multiple of 4: under tensor parallelism the vocabulary is padded."""

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


def write_model(directory: Path, kind: str, tied: bool = False, **changes: Any) -> torch.nn.Module:
    """A random Hugging Face model, saved into `directory` and returned."""
    import transformers

    transformers.logging.disable_progress_bar()
    if kind == "qwen3":
        config = transformers.Qwen3Config(**SHAPE | {"head_dim": 32, "tie_word_embeddings": tied} | changes)
    else:
        config = transformers.LlamaConfig(**SHAPE | {"tie_word_embeddings": tied} | changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in name))
    model.save_pretrained(directory)
    return model


@dataclass(frozen=True)
class Built:
    grid: Any
    chunks: list[torch.nn.Module]
    map: Any
    config: Any


def build(model_path: Path, parallel: ParallelSpec, dtype: str = "fp32") -> Built:
    """The loaded model on this rank's grid, not yet wrapped."""
    import megatron_patches

    megatron_patches.apply()
    from slimerl.training import capabilities, model, model_config, weights
    from slimerl.training import parallel as grids

    here = capabilities.detect()
    grid = grids.start(parallel, here, here.device(0), timeout_s=60, seed=1)
    hf = model_config.read_config(model_path)
    arguments = model_config.model_arguments(hf)
    config = model_config.transformer_config(arguments, parallel, dtype, here)
    where = weights.model_map(hf, parallel, here)
    chunks = model.build_chunks(arguments, config, here, where.vocabulary_rows(arguments.vocab_size))
    weights.load_weights(chunks, model_path, where, grid.rank)
    return Built(grid, chunks, where, config)


@dataclass(frozen=True)
class Step:
    """What one training step is given: samples in step order."""

    samples: list[Any]


def random_step(seed: int, samples: int = 12, longest: int = 20, on_policy: bool = False) -> Step:
    """Samples of various lengths, with prompts, tool tokens and advantages of both signs."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(samples):
        prompt, response = int(random.integers(1, 6)), int(random.integers(1, longest))
        sampled = random.random(response) > 0.2
        sampled[0] = True
        made.append(
            TrainingSample(
                sample_id=f"s{index}",
                tokens=random.integers(0, VOCABULARY, prompt + response).astype(np.int32),
                prompt_length=prompt,
                sampled=sampled,
                behavior_logprobs=np.where(sampled, random.uniform(-6, -3, response), 0).astype(np.float32),
                advantage=float(random.normal()),
            )
        )
    return Step(made)


def micro_batches(step: Step, grid: Any, budget: int, minibatches: int = 1, temperature: float = 1.0) -> list[Any]:
    """This rank's micro-batches, per minibatch."""
    from slimerl.training.batches import pack
    from slimerl.training.packing import plan_step

    plan = plan_step([len(sample.tokens) for sample in step.samples], grid.data_size, budget, minibatches)
    return [
        [pack([step.samples[i] for i in each], temperature, grid.tensor_size) for each in minibatch]
        for minibatch in plan.of_rank(grid.data_rank)
    ]


def trainer(built: Built, algorithm: AlgorithmSpec, optimizer: OptimizerSpec, steps: int) -> Any:
    from slimerl.training.model import wrap_for_training
    from slimerl.training.optimizer import build_optimizer, build_schedule
    from slimerl.training.step import PolicyTrainer

    chunks = wrap_for_training(built.chunks, built.config)
    adam = build_optimizer(optimizer, chunks, built.config.params_dtype)
    schedule = build_schedule(optimizer, steps, adam)
    return PolicyTrainer(chunks, adam, schedule, algorithm_of(algorithm), built.grid)


def collected(built: Built) -> dict[str, torch.Tensor]:
    """The whole model under Hugging Face names, the same on every rank (a test's own way, apart from the export)."""
    from slimerl.training.weights import named_parameters

    parameters = named_parameters(built.chunks)
    dtype = next(iter(parameters.values())).dtype
    out = {t.name: torch.zeros(t.shape, dtype=dtype) for t in built.map.logical_tensors(dtype)}
    collect(built.map.placements(built.grid.rank), parameters, out)
    for name, tensor in out.items():
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        # every rank has its own part and zeros elsewhere; replicated parts agree, so the largest magnitude is the value
        stacked = torch.stack(parts)
        out[name] = stacked.gather(0, stacked.abs().argmax(0, keepdim=True))[0]
    return out
