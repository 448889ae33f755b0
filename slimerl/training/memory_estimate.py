"""How much memory a run takes, from its sizes alone. Pure: nothing is built, read or measured.

Flows in: the model's `config.json`, the layouts, the tokens computed at once. Flows out: bytes by purpose, of the
trainer rank and the engine rank that take most. Invariant: parameters are counted from the same placements by which
weights move, so that every family and layout is counted exactly; the rest are estimates, with their source beside them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch

from slimerl.resharding.families import Form, family_of
from slimerl.resharding.families.family import PLAIN
from slimerl.resharding.families.scales import scale_name
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.tensors import Placement
from slimerl.training.logits_budget import CHUNK_BYTES, KEPT_BYTES
from slimerl.training.memory import FREE_BYTES

GIB = 2**30

TRAINER_RUNTIME_BYTES = int(0.6 * GIB)
"""Libraries of one trainer process: torch, Megatron. These four were measured with a model of 1M parameters on a CPU
(resident memory; what several processes share is counted once for each)."""
ENGINE_RUNTIME_BYTES = int(0.6 * GIB)
"""Of one engine rank."""
SERVER_RUNTIME_BYTES = int(0.9 * GIB)
"""Of an engine's other processes together: HTTP server and detokenizer."""
SIDE_RUNTIME_BYTES = int(0.9 * GIB)
"""The rollout role with its reward workers, the conductor and torchrun."""
DEVICE_RUNTIME_BYTES = int(1.5 * GIB)
"""On a GPU: the CUDA context, NCCL's buffers, the libraries' workspaces."""

GRADIENT_BYTES = 4
"""Megatron's gradient buffer (grad_reduce_in_fp32)."""
OPTIMIZER_BYTES = {torch.float32: 8, torch.bfloat16: 12}
"""Of one parameter: two moments, and a float32 copy where the weights are narrower. Spread over the data-parallel
ranks (Megatron-LM, docs/source/api-guide/dist_optimizer.md: 8 + 8/d and 6 + 12/d bytes a parameter)."""
UNFUSED = 2.0
"""Without fused kernels autograd also keeps what lies between the matrices: rotary copies, the SiLU's output, float32
copies inside norms. Measured against a 135M-parameter Llama in float32 and bfloat16."""
CHUNK_COPIES = 3
"""Of one chunk of logits at a time: as multiplied, in float32, as log-probabilities."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one trainer rank."""

    stage: int
    """Pipeline stage of the rank that takes most."""
    parameters: int
    """How many, not bytes."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    runtime: int
    reference: int
    """The reference model's weights. On a machine with CUDA they lie in host memory instead, and are not in here."""
    critic: int = 0
    """The critic's weights, gradients and optimizer; what a pass of it keeps takes the place of the policy's."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self)[2:])

    @property
    def kept(self) -> int:
        """On a GPU that it shares with an engine, while that has the rest (`hand_over.py`)."""
        return self.runtime


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one rank of an engine."""

    parameters: int
    """How many, not bytes."""
    weights: int
    kv_cache: int
    workspace: int
    runtime: int
    staging: int = 0
    """New weights on their way in, beside those that serve (`sync.staged`)."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self)[1:])

    @property
    def kept(self) -> int:
        """On a GPU that it shares with a trainer, while that has the rest."""
        return self.workspace + self.runtime


def trainer_memory(
    config: Mapping[str, Any],
    layout: MegatronLayout,
    dtype: torch.dtype,
    tokens: int,
    *,
    sequence_parallel: bool = False,
    recompute: str = "none",
    fused: bool = False,
    cuda: bool = False,
    reference: bool = False,
    form: Form = PLAIN,
) -> TrainerMemory:
    """The rank that takes most, over the pipeline stages (ranks of one stage take the same).

    Args:
        tokens: that a rank computes at once, `training.micro_batch_tokens` or one longest sample.
        recompute: "full" keeps the input of each layer, and one layer's numbers while its gradient is computed;
            "selective" changes nothing here, since the attention matrix is not kept anyway.
        fused: Transformer Engine's kernels.
        reference: the algorithm needs a reference model (`reference.py`).
        form: with a scalar head there are no logits.

    Raises:
        ConfigError, LayoutError: the model has no table, or cannot be cut like that.
    """
    of_stage = layout.world_size // layout.pipeline
    found = []
    for stage in range(layout.pipeline):
        shapes = _shapes(family_of(config).megatron_placements(config, layout, stage * of_stage, form))
        share = layout.tensor if sequence_parallel else 1
        kept_per_token = _activation_width(shapes, config, share) * (1 if fused else UNFUSED)
        in_flight = _in_flight(layout, stage)
        if recompute == "full":
            layers = max(1, len(layout.layers(stage * of_stage, config["num_hidden_layers"])))
            per_token = config["hidden_size"] / share * layers * in_flight + kept_per_token / layers
        else:
            per_token = kept_per_token * in_flight
        activations = int(per_token * tokens * dtype.itemsize)
        asked = layout.last_prefix(stage * of_stage) is not None and not form.score
        logits = _logits(shapes, tokens) if asked else 0
        kept = 0 if cuda else min(FREE_BYTES, activations + logits)
        dense, experts = _count(shapes, experts=False), _count(shapes, experts=True)
        found.append(
            TrainerMemory(
                stage=stage,
                parameters=dense + experts,
                weights=(dense + experts) * dtype.itemsize,
                gradients=(dense + experts) * GRADIENT_BYTES,
                optimizer=_optimizer(layout, dense, experts, dtype),
                activations=activations,
                logits=logits,
                runtime=DEVICE_RUNTIME_BYTES if cuda else TRAINER_RUNTIME_BYTES + kept,
                reference=(dense + experts) * dtype.itemsize if reference and not cuda else 0,
            )
        )
    return max(found, key=lambda memory: memory.total)


def with_critic(policy: TrainerMemory, critic: TrainerMemory) -> TrainerMemory:
    """A rank of both, each counted where it takes most; they compute one after the other."""
    return replace(
        policy,
        activations=max(policy.activations, critic.activations),
        critic=critic.weights + critic.gradients + critic.optimizer,
    )


def engine_memory(
    config: Mapping[str, Any],
    layout: EngineLayout,
    dtype: torch.dtype,
    kv_tokens: int,
    running_requests: int,
    context_tokens: int,
    cuda: bool = False,
    form: Form = PLAIN,
) -> EngineMemory:
    """One rank of one SGLang server (its ranks take the same).

    Args:
        dtype: of what is not quantised.
        kv_tokens: `engine.max_total_tokens`.
        form: of the weights: FP8 with its scales.

    Raises:
        ConfigError, LayoutError: the model has no table, or cannot be cut like that.
    """
    placements = family_of(config).engine_placements(config, layout, 0, form)
    shapes = _shapes(placements)
    scales = {scale_name(name) for name in shapes} & shapes.keys()
    weights = sum(prod(shape) * _stored_bytes(name, scales, dtype) for name, shape in shapes.items())
    vocabulary = max(shape[0] for name, shape in shapes.items() if name.endswith("embed_tokens.weight"))
    return EngineMemory(
        parameters=_count({name: shape for name, shape in shapes.items() if name not in scales}),
        # latent attention: the engine keeps kv_b_proj a second time, split and transposed (w_kc, w_vc)
        weights=weights + _rows(placements, "kv_b_proj.weight", columns=True) * dtype.itemsize,
        kv_cache=kv_tokens * _kv_width(placements) * dtype.itemsize,
        # the table of each request's cache places; logits and their log-probabilities in float32
        workspace=running_requests * (context_tokens * 4 + vocabulary * 2 * 4),
        runtime=DEVICE_RUNTIME_BYTES if cuda else ENGINE_RUNTIME_BYTES,
    )


def checkpoint_bytes(config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """A resumable checkpoint of the whole model: weights and optimizer state, over all files."""
    return family_of(config).numel(config) * (dtype.itemsize + OPTIMIZER_BYTES[dtype])


def export_bytes(config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """The model as a Hugging Face checkpoint."""
    return family_of(config).nbytes(config, dtype, checkpoint=True)


Shapes = dict[str, tuple[int, ...]]


def _shapes(placements: Iterable[Placement]) -> Shapes:
    """Shape of each parameter; its placements tile it."""
    shapes: Shapes = {}
    for placement in placements:
        known, stops = shapes.get(placement.parameter), placement.at.stops
        shapes[placement.parameter] = stops if known is None else tuple(map(max, known, stops))
    return shapes


def _stored_bytes(parameter: str, scales: Collection[str], dtype: torch.dtype) -> int:
    """Of one element. `scales`: the parameters that are scales of others."""
    if parameter in scales:
        return torch.float32.itemsize
    return torch.float8_e4m3fn.itemsize if scale_name(parameter) in scales else dtype.itemsize


def _is_expert(parameter: str) -> bool:
    return ".experts." in parameter


def _count(shapes: Shapes, experts: bool | None = None) -> int:
    return sum(prod(shape) for name, shape in shapes.items() if experts is None or _is_expert(name) == experts)


def _optimizer(layout: MegatronLayout, dense: int, experts: int, dtype: torch.dtype) -> int:
    """Experts are replicated over other ranks than the rest, so that their state is spread over others too."""
    replicas = layout.data * layout.context
    expert_replicas = layout.world_size // (layout.pipeline * layout.expert_tensor_size * layout.expert)
    return int((dense / replicas + experts / expert_replicas) * OPTIMIZER_BYTES[dtype])


def _activation_width(shapes: Shapes, config: Mapping[str, Any], share: int) -> float:
    """Numbers kept per token for the backward pass in the layers of a rank: what goes into each matrix and comes out.

    The same terms as in Korthikanti et al. 2022 (arXiv:2205.05198, equation 2) without the attention matrix, which no
    kernel used here keeps, taken from the shapes so that they hold for any family. Routing is taken as balanced.

    Args:
        share: sequence parallelism: ranks over which a whole hidden state is spread.
    """
    hidden, chosen = config["hidden_size"], config.get("num_experts_per_tok") or 0
    per_layer: dict[str, int] = {}
    for name, shape in shapes.items():
        if _is_expert(name) and len(shape) == 2:
            per_layer[_before_experts(name)] = per_layer.get(_before_experts(name), 0) + 1
    width = 0.0
    for name, shape in shapes.items():
        if "layers." not in name:
            continue
        # a norm keeps what goes into it
        sides = shape if len(shape) == 2 else shape[:1] if name.endswith("norm.weight") else ()
        numbers = sum(side / share if side == hidden else side for side in sides)
        # an expert has two matrices
        held = per_layer[_before_experts(name)] / 2 if _is_expert(name) else 1
        width += numbers * chosen / held if _is_expert(name) else numbers
    return width


def _before_experts(parameter: str) -> str:
    return parameter.partition(".experts.")[0]


def _in_flight(layout: MegatronLayout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    interleaved = (layout.pipeline - 1) / layout.virtual if layout.virtual > 1 else 0
    return layout.pipeline - stage + interleaved


def _logits(shapes: Shapes, tokens: int) -> int:
    """On the last stage (`slimerl/training/logprobs.py`): the logits that are kept, a chunk of them, and the
    gradient of the output layer."""
    heads = ("output_layer.weight", "word_embeddings.weight")
    rows, width = next(shape for head in heads for name, shape in shapes.items() if name.endswith(head))
    whole = tokens * rows * 4
    return (whole if whole <= KEPT_BYTES else 0) + CHUNK_COPIES * min(whole, CHUNK_BYTES) + rows * width * 4


def _kv_width(placements: Iterable[Placement]) -> int:
    """Numbers that an engine rank caches per token, over all layers: keys and values, or what both are made from."""
    placements = list(placements)
    return 2 * _rows(placements, "self_attn.k_proj.weight") + _rows(placements, "kv_a_proj_with_mqa.weight")


def _rows(placements: Iterable[Placement], tensor: str, columns: bool = False) -> int:
    """Rows (or elements) of the tensors of that name that a rank holds."""
    boxes = (placement.box for placement in placements if placement.tensor.endswith(tensor))
    return sum(box.numel if columns else box.shape[0] for box in boxes)
