"""What follows from a spec, as a table for people: `slimerl check`.

Flows in: a spec that has passed the preflight. Flows out: the table. Invariant: figures come from the functions that
the run itself, or the preflight, computes with.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from slimerl.conductor.estimate import RunEstimate, estimate, longest_sample_tokens, samples_per_step, tokens_at_once
from slimerl.conductor.preflight.machine import available_memory_bytes
from slimerl.conductor.preflight.scored import critic_config
from slimerl.resharding.families import family_of
from slimerl.spec import RunSpec
from slimerl.spec.engine import EngineSpec
from slimerl.training.capabilities import Capabilities, detect
from slimerl.training.engine_layout import engine_config
from slimerl.training.memory_estimate import GIB, SERVER_RUNTIME_BYTES
from slimerl.training.model_config import read_config

MIB = 2**20


def derived_table(spec: RunSpec) -> Table:
    """Layout, ranks, samples, tokens, bytes and memory of the run on this machine."""
    capabilities = detect()
    config = read_config(spec.model.path)
    needed = estimate(spec, config, capabilities, engine_config(spec, config), critic_config(spec))
    table = Table(title=f"run {spec.name}: ready", title_justify="left", show_header=False)
    for label, value in (*layout_rows(spec, config, needed), *room_rows(spec, needed, capabilities)):
        table.add_row(label, value)
    return table


def layout_rows(spec: RunSpec, config: Mapping[str, Any], needed: RunEstimate) -> Iterator[tuple[str, str]]:
    """The model, how it lies on the ranks, and what a step is."""
    family = f"{config['model_type']}, {config['num_hidden_layers']} layers, hidden {config['hidden_size']}"
    yield "model", f"{spec.model.path} ({family}, {family_of(config).numel(config):,} parameters, {spec.model.dtype})"
    if spec.model.megatron_path is not None:
        yield "trainer's weights", str(spec.model.megatron_path)
    if (critic := spec.critic_path) is not None:
        warmup = spec.algorithm.value_warmup_steps
        yield "critic", f"{critic}" + (f", alone for {warmup} steps" if warmup else "")
    yield from _trainer(spec, needed)
    yield from _sampling(spec, needed)


def _trainer(spec: RunSpec, needed: RunEstimate) -> Iterator[tuple[str, str]]:
    training, parallel = spec.training, spec.training.parallel
    sizes = {
        "tensor": parallel.tensor,
        "context": parallel.context,
        "pipeline": parallel.pipeline,
        "data": parallel.data,
    }
    yield "trainer ranks", f"{parallel.world_size} = " + " × ".join(f"{name} {size}" for name, size in sizes.items())
    if parallel.expert > 1 or parallel.expert_tensor is not None:
        yield "experts", f"over {parallel.expert} ranks, each cut in {parallel.expert_tensor_size}"
    if parallel.pipeline > 1:
        stages = parallel.pipeline_layout or f"equal, {parallel.virtual} chunks each"
        yield "pipeline stages", stages
    yield "parameters, trainer rank", f"{needed.trainer.parameters:,} at most ({_gib(needed.trainer.weights)} GiB)"
    yield "steps", f"{training.steps}, optimizer updates in each: {training.minibatches_per_step}"


def _sampling(spec: RunSpec, needed: RunEstimate) -> Iterator[tuple[str, str]]:
    training, rollout, engine = spec.training, spec.rollout, spec.engine
    samples, longest = samples_per_step(spec), longest_sample_tokens(spec)
    if longest is None:
        yield "samples per step", f"{samples} rows"
    else:
        yield (
            "samples per step",
            f"{samples} = {training.prompts_per_step} prompts × {rollout.samples_per_prompt}, "
            f"up to {samples * longest:,} tokens",
        )
        yield "longest sample", f"{longest} tokens of a context of {engine.context_tokens}"
        yield "engines", _engines(engine, spec.evaluation.engines)
        if engine.model_path is not None:
            yield "engines' checkpoint", str(engine.model_path)
        ahead = rollout.max_staleness + 1 if rollout.oversample is None else rollout.oversample
        under_way = f"up to {math.ceil(ahead * training.prompts_per_step)} prompts under way"
        yield "staleness", f"{rollout.max_staleness} ({_mode(rollout.max_staleness)}), {under_way}"
        kept = f"; {needed.sent_state / MIB:,.0f} MiB of host memory kept for it" if needed.sent_state else ""
        yield "weight sync", f"{needed.sync_bytes / MIB:,.0f} MiB to each engine, by {spec.sync.transport}{kept}"
    yield "micro-batch", f"up to {tokens_at_once(spec):,} tokens on a rank at once"


def _engines(engine: EngineSpec, evaluators: int) -> str:
    parts = [f"{engine.replicas} × tensor {engine.tensor_parallel}"]
    if evaluators:
        parts.append(f"the last {evaluators} of them for evaluations alone")
    if engine.elastic is not None:
        parts.append(f"{engine.elastic.min} to {engine.elastic.max} by load")
    if engine.expert_parallel > 1:
        parts.append(f"experts over {engine.expert_parallel}")
    if engine.data_parallel_attention > 1:
        parts.append(f"attention in {engine.data_parallel_attention} groups")
    if engine.replicated_mlp:
        parts.append("other MLPs whole on each GPU")
    return ", ".join(parts)


def room_rows(spec: RunSpec, needed: RunEstimate, capabilities: Capabilities) -> Iterator[tuple[str, str]]:
    trainer, engine = needed.trainer, needed.engine
    reference = f", reference model {_gib(trainer.reference)}" if trainer.reference else ""
    critic = f", critic {_gib(trainer.critic)}" if trainer.critic else ""
    if engine is not None:
        yield "parameters, engine rank", f"{engine.parameters:,} ({_gib(engine.weights)} GiB)"
    yield (
        "memory, trainer rank",
        f"{_gib(trainer.total)} GiB: weights {_gib(trainer.weights)}, gradients {_gib(trainer.gradients)}, optimizer "
        f"{_gib(trainer.optimizer)}, activations {_gib(trainer.activations)}, logits {_gib(trainer.logits)}, "
        f"process {_gib(trainer.runtime)}{reference}{critic}",
    )
    if engine is not None:
        staging = f", those on their way in {_gib(engine.staging)}" if engine.staging else ""
        yield (
            "memory, engine rank",
            f"{_gib(engine.total)} GiB: weights {_gib(engine.weights)}{staging}, KV cache {_gib(engine.kv_cache)}, "
            f"process {_gib(engine.runtime)}; and {_gib(SERVER_RUNTIME_BYTES)} a server",
        )
    if not capabilities.cuda:
        yield "memory, all roles", f"{_gib(needed.host)} of {_gib(available_memory_bytes())} GiB available"
    yield "run directory", str(spec.run_dir)
    checkpoint = spec.checkpoint
    when = (
        f", every {checkpoint.every_steps} steps, {checkpoint.keep_last} kept" if checkpoint.every_steps else ", none"
    )
    yield "resumable checkpoint", f"{_gib(needed.checkpoint)} GiB{when}"
    if checkpoint.local_dir is not None:
        yield (
            "local checkpoint",
            f"each rank's part, every {checkpoint.local_every_steps} steps, {checkpoint.local_dir}",
        )
    yield "trained model", f"{spec.export_dir} ({_gib(needed.export)} GiB)"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _mode(staleness: int) -> str:
    return {0: "synchronous", 1: "one step off"}.get(staleness, "asynchronous")
