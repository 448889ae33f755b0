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

ROUTED = {"num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}
SIGMOID = ROUTED | {"n_routed_experts": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", ROUTED | {"head_dim": 32, "num_experts": 8}),
    "glm4_moe": ("Glm4MoeConfig", SIGMOID | {"attention_bias": True, "use_qk_norm": True}),
    "deepseek_v3": ("DeepseekV3Config", SIGMOID | LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN}),
}
"""transformers' configuration class and what differs from `SHAPE`."""


def write_model(
    directory: Path, kind: str, tied: bool = False, scored: bool = False, **changes: Any
) -> torch.nn.Module:
    """A random Hugging Face model, saved into `directory` and returned; `scored`: with a scalar head."""
    import transformers

    transformers.logging.disable_progress_bar()
    config_class, own = KINDS[kind]
    config = getattr(transformers, config_class)(**SHAPE | own | {"tie_word_embeddings": tied} | changes)
    torch.manual_seed(0)
    made = transformers.AutoModelForSequenceClassification if scored else transformers.AutoModelForCausalLM
    if scored:
        config.num_labels = 1
    model = made.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in name))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand_like(buffer) * 0.2)
    model.save_pretrained(directory)
    return model


@dataclass(frozen=True)
class Built:
    grid: Any
    chunks: list[torch.nn.Module]
    map: Any
    config: Any


def start(parallel: ParallelSpec) -> Any:
    """This rank's grid."""
    import megatron_patches

    megatron_patches.apply()
    from slimerl.training import capabilities
    from slimerl.training import parallel as grids

    here = capabilities.detect()
    return grids.start(parallel, here, here.device(0), timeout_s=60, seed=1)


def build(
    model_path: Path, parallel: ParallelSpec, dtype: str = "fp32", grid: Any = None, scored: bool = False
) -> Built:
    """The loaded model on this rank's grid, not yet wrapped; `scored`: with a scalar head."""
    grid = start(parallel) if grid is None else grid
    from slimerl.resharding.families.family import Form
    from slimerl.training import capabilities, model, model_config, value_model, weights

    here = capabilities.detect()
    hf = model_config.read_config(model_path)
    arguments = model_config.model_arguments(hf)
    config = model_config.transformer_config(arguments, parallel, dtype, here)
    where = weights.model_map(hf, parallel, here, Form(score=scored))
    kind = value_model.ValueModel if scored else model.PolicyModel
    chunks = model.build_chunks(arguments, config, here, where.vocabulary_rows(arguments.vocab_size), kind)
    weights.load_weights(chunks, model_path, where, grid.rank)
    return Built(grid, chunks, where, config)


@dataclass(frozen=True)
class Step:
    """What one training step is given: samples in step order."""

    samples: list[Any]


def random_step(seed: int, samples: int = 12, longest: int = 20, group: int = 4) -> Step:
    """Samples of various lengths, `group` of them for each prompt, with tool tokens and advantages of both signs."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(samples):
        if index % group == 0:
            prompt_tokens = random.integers(0, VOCABULARY, random.integers(1, 12)).astype(np.int32)
        prompt, response = len(prompt_tokens), int(random.integers(1, longest))
        sampled = random.random(response) > 0.2
        sampled[0] = True
        made.append(
            TrainingSample(
                sample_id=f"s{index}",
                tokens=np.concatenate([prompt_tokens, random.integers(0, VOCABULARY, response).astype(np.int32)]),
                prompt_length=prompt,
                sampled=sampled,
                behavior_logprobs=np.where(sampled, random.uniform(-6, -3, response), 0).astype(np.float32),
                advantage=float(random.normal()),
            )
        )
    return Step(made)


def plain_pack(lengths: list[int]) -> Any:
    """What attention is told of sequences one after the other."""
    from itertools import accumulate

    from slimerl.training.segments import Segment, lay_segments

    starts = accumulate(lengths, initial=0)
    return lay_segments([Segment(start, length) for start, length in zip(starts, lengths, strict=False)], 1).packed


def micro_batches(
    step: Step,
    built: Built,
    budget: int,
    minibatches: int = 1,
    temperature: float = 1.0,
    shared_prefix: bool = False,
    at_least: int = 1,
    routed: Any = None,
    pairs: bool = False,
    scores: bool = False,
) -> list[Any]:
    """This rank's micro-batches, per minibatch, `at_least` so many. Samples with equal prompts form a group, or, with
    `pairs`, two samples one after the other."""
    from slimerl.training.batches import PackForm
    from slimerl.training.batching import Batching
    from slimerl.training.packing import PackingRules, SampleShape
    from slimerl.training.segments import Stripes

    grid = built.grid
    sizes = grid.sizes
    multiple = max(at_least, sizes.pipeline if sizes.virtual > 1 else 1)
    batching = Batching(
        PackingRules(sizes.data, budget, shared_prefix, multiple=multiple, pairs=pairs),
        PackForm(sizes.tensor, Stripes(grid.place.context, sizes.context), shared_prefix, routed=routed, scores=scores),
        temperature,
    )
    shapes = [
        SampleShape(
            *(each.prompt_length, len(each.sampled)),
            number // 2 if pairs else each.tokens[: each.prompt_length].tobytes(),
            int(each.sampled.sum()),
        )
        for number, each in enumerate(step.samples)
    ]
    return batching.packs(batching.plan(shapes, minibatches), step.samples, grid.place.data)


def trainer(
    built: Built,
    algorithm: AlgorithmSpec,
    optimizer: OptimizerSpec,
    steps: int,
    routing: str = "none",
    critic: Any = None,
) -> Any:
    from slimerl.training.model import wrap_for_training
    from slimerl.training.optimizer import build_optimizer, build_schedule
    from slimerl.training.routing_replay import RoutingReplay
    from slimerl.training.step import PolicyTrainer

    chunks = wrap_for_training(built.chunks, built.config)
    adam = build_optimizer(optimizer, chunks, built.config.params_dtype)
    schedule = build_schedule(optimizer, steps, adam)
    refresh_steps = algorithm.reference_refresh_steps
    replay = RoutingReplay(chunks, routing)  # type: ignore[arg-type]
    return PolicyTrainer(
        chunks, adam, schedule, algorithm_of(algorithm), built.grid, refresh_steps, replay, critic=critic
    )


def collected(built: Built) -> dict[str, torch.Tensor]:
    """The whole model under Hugging Face names, the same on every rank (a test's own way, apart from the export)."""
    from slimerl.training.weights import named_parameters

    parameters = named_parameters(built.chunks)
    dtype = next(iter(parameters.values())).dtype
    out = {t.name: torch.zeros(t.shape, dtype=dtype) for t in built.map.logical_tensors(dtype)}
    collect(built.map.placements(built.grid.rank), parameters, out)
    flat = torch.cat([tensor.flatten() for tensor in out.values()])
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    # every rank has its own part and zeros elsewhere; replicated parts agree, so the largest magnitude is the value
    stacked = torch.stack(parts)
    whole = stacked.gather(0, stacked.abs().argmax(0, keepdim=True))[0]
    sizes = [tensor.numel() for tensor in out.values()]
    return {name: part.view(out[name].shape) for name, part in zip(out, whole.split(sizes), strict=True)}
