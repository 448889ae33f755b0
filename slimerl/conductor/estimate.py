"""What a run takes from its machine: memory of every role, and what it writes. Pure.

Flows in: the spec, the parsed `config.json`, what the machine offers. Flows out: bytes, by role.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from slimerl.resharding.families import family_of
from slimerl.resharding.families.family import PLAIN, SCORED, Form
from slimerl.spec import RunSpec
from slimerl.training.capabilities import Capabilities
from slimerl.training.engine_layout import engine_form, engine_layout
from slimerl.training.memory_estimate import (
    SERVER_RUNTIME_BYTES,
    SIDE_RUNTIME_BYTES,
    EngineMemory,
    TrainerMemory,
    checkpoint_bytes,
    engine_memory,
    export_bytes,
    trainer_memory,
    with_critic,
)
from slimerl.training.trainer_layout import trainer_layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

EXPORT_BUFFER_BYTES = 4 * 2**30
"""A shard of the exported checkpoint, collected before it is written."""

RECORD_BYTES = 256 * 2**20
"""Logs, metrics and trace of a run."""

SYNC_BUCKETS = 2
"""Buckets under way at a time; with the `ipc` transport in shared memory."""


@dataclass(frozen=True)
class RunEstimate:
    """Bytes; `trainer` and `engine` are one rank each."""

    trainer: TrainerMemory
    engine: EngineMemory | None
    """None: the algorithm samples nothing."""
    sync_bytes: int
    """The weights once, as they travel at each sync."""
    sync_buckets: int
    """On a GPU: the buckets under way, and the one that is being gathered."""
    shared_memory: int
    sent_state: int
    """Of `sync.transport: delta`, in host memory of the first trainer rank: what it sent last, and patches with
    everything for an engine that has just started."""
    export: int
    checkpoint: int
    """One resumable checkpoint."""
    host: int
    """All processes of the run together, on a machine without CUDA."""


def estimate(
    spec: RunSpec,
    config: Mapping[str, Any],
    capabilities: Capabilities,
    of_engines: Mapping[str, Any] | None = None,
    of_critic: Mapping[str, Any] | None = None,
) -> RunEstimate:
    """What the run takes.

    Args:
        config: the trainer's `config.json`.
        of_engines: that of the engines' checkpoint (`engine_layout.engine_config`); None: the same.
        of_critic: that of the critic's, where there is one; None: the same.

    Raises:
        ConfigError, LayoutError: the model cannot be laid out as the spec asks.
    """
    dtype, parallel = DTYPES[spec.model.dtype], spec.training.parallel

    def trained(of: Mapping[str, Any], form: Form) -> TrainerMemory:
        return trainer_memory(
            of,
            trainer_layout(of, parallel, capabilities),
            dtype,
            tokens_at_once(spec),
            sequence_parallel=parallel.sequence_parallel,
            recompute=spec.training.recompute,
            fused=capabilities.for_dtype(spec.model.dtype).transformer_engine,
            cuda=capabilities.cuda,
            reference=spec.algorithm.has_reference_model and form is not SCORED,
            form=form,
        )

    trainer = trained(config, SCORED if spec.algorithm.name == "reward_model" else PLAIN)
    checkpoint = checkpoint_bytes(config, dtype)
    if spec.algorithm.has_critic:
        critic = config if of_critic is None else of_critic
        trainer = with_critic(trainer, trained(critic, SCORED))
        checkpoint += checkpoint_bytes(critic, dtype)
    exported = export_bytes(config, dtype)
    host = parallel.world_size * trainer.total + min(exported, EXPORT_BUFFER_BYTES) + SIDE_RUNTIME_BYTES
    engine, sync, bucket, shared, sent_state = None, 0, 0, 0, 0
    if spec.uses_engines:
        served = config if of_engines is None else of_engines
        engine = engine_memory(
            served,
            engine_layout(spec.engine),
            dtype,
            spec.engine.max_total_tokens,
            spec.rollout.max_running_requests,
            spec.engine.context_tokens,
            capabilities.cuda,
            engine_form(served),
        )
        if spec.sync.transport == "shards" and spec.sync.staged:
            engine = replace(engine, staging=engine.weights)
        sync = family_of(served).nbytes(served, dtype, engine_form(served))
        bucket = _largest_bucket(served, dtype, spec.sync.bucket_mib * 2**20)
        if spec.sync.transport == "ipc":
            shared = SYNC_BUCKETS * bucket
        if spec.sync.transport == "delta":
            sent_state = sync + (SYNC_BUCKETS + 1) * bucket
        of_engine = spec.engine.tensor_parallel * engine.total + SERVER_RUNTIME_BYTES
        host += spec.engine.replicas * of_engine + shared + sent_state
    return RunEstimate(
        trainer=trainer,
        engine=engine,
        sync_bytes=sync,
        sync_buckets=(SYNC_BUCKETS + 1) * bucket,
        shared_memory=shared,
        sent_state=sent_state,
        export=exported,
        checkpoint=checkpoint,
        host=host,
    )


def _largest_bucket(served: Mapping[str, Any], dtype: torch.dtype, bucket_bytes: int) -> int:
    """Bytes, at most: above the bound where one tensor or fused group is."""
    family, form = family_of(served), engine_form(served)
    largest, whole = family.bucket_extremes(served, dtype, form)
    return min(max(bucket_bytes, largest), whole)


def samples_per_step(spec: RunSpec) -> int:
    return spec.training.prompts_per_step * (spec.rollout.samples_per_prompt if spec.uses_engines else 1)


def longest_sample_tokens(spec: RunSpec) -> int | None:
    """Prompt and response; None where the responses come from the data."""
    return spec.data.max_prompt_tokens + spec.rollout.max_new_tokens if spec.uses_engines else None


def tokens_at_once(spec: RunSpec) -> int:
    """The largest micro-batch of a rank: the budget, or one sample that is longer, or all that there is in a step."""
    budget, longest = spec.training.micro_batch_tokens, longest_sample_tokens(spec)
    if longest is None:
        return budget
    of_rank = -(-samples_per_step(spec) // spec.training.parallel.data)
    return min(max(budget, longest), of_rank * longest)
