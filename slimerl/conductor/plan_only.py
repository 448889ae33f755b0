"""`slimerl check SPEC --plan-only`: a run on a cluster, checked on a machine that has neither its files nor its GPUs.

Flows in: the spec, the model's published `config.json` (`models/NAME.json` beside the spec). Flows out: a table, or
the faults. Invariant: nothing of this machine enters; what is checked is what a run checks, but for files, data, disk
and ports, and the plan of the weight sync stands for the placements of every rank.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from slimerl.conductor.derived import layout_rows, room_rows
from slimerl.conductor.estimate import DTYPES, estimate
from slimerl.conductor.preflight.machine import gpu_memory_faults
from slimerl.conductor.preflight.model import (
    engine_size_faults,
    placement_faults,
    same_model_faults,
    serving_faults,
    size_faults,
)
from slimerl.conductor.reach import lasting_faults, reach_faults
from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families import ConfigError
from slimerl.resharding.families.scales import BlockCutError
from slimerl.resharding.layouts import LayoutError
from slimerl.resharding.planner import MOST_GPUS, SyncShape, make_plan
from slimerl.resharding.planner.bounds import colocated_ingress_bound
from slimerl.spec import RunSpec
from slimerl.training.capabilities import Capabilities
from slimerl.training.engine_layout import engine_form, engine_layout, sync_topology
from slimerl.training.memory_estimate import GIB
from slimerl.training.model_config import UnsupportedModel, model_arguments
from slimerl.training.trainer_layout import trainer_layout

GPUS = Capabilities(cuda=True, transformer_engine=True)
"""What the cluster's machines are taken to offer."""

Config = Mapping[str, Any]


class PlanFaults(Exception):
    """The spec cannot run on any cluster as it stands; one line for each fault."""


def planned_table(spec: RunSpec, directory: Path) -> Table:
    """Layout, bytes and memory of every rank, and the weight sync with its lower bound.

    Args:
        directory: where the spec lies.

    Raises:
        PlanFaults: it cannot run like that.
    """
    try:
        config, served = published_configs(spec, directory)
        if faults := list(_scale_faults(spec)):
            raise PlanFaults("\n".join(faults))
        arguments = model_arguments(config)
        faults = [*size_faults(spec, config), *_engine_faults(spec, config, served, arguments.max_sequence_tokens)]
        if faults:
            raise PlanFaults("\n".join(faults))
        path = spec.critic_path
        critic = None if path in (None, spec.model.path) else _published("training.critic.path", path, directory)
        needed = estimate(spec, config, GPUS, served, critic)
        each = int(spec.cluster.gpu_memory_gib * GIB)
        if faults := list(gpu_memory_faults(needed, each, spec.is_colocated)):
            raise PlanFaults("\n".join(faults))
        table = Table(title=f"run {spec.name}: the plan holds", title_justify="left", show_header=False)
        rows = [*layout_rows(spec, config, needed), *_cluster(spec), *room_rows(spec, needed, GPUS)]
        if spec.uses_engines:
            rows += _sync(sync_shape(spec, config, served), spec)
    except (ConfigError, CoverageError, LayoutError, UnsupportedModel) as error:
        raise PlanFaults(str(error)) from None
    for label, value in rows:
        table.add_row(label, value)
    return table


def published_configs(spec: RunSpec, directory: Path) -> tuple[Config, Config]:
    """(the trainer's, the engines') `config.json`. A published quantisation is that of the engines' checkpoint: the
    trainer's is the same model converted to bf16.

    Raises:
        UnsupportedModel: no such file.
    """
    config = dict(_published("model.path", spec.model.path, directory))
    config.pop("quantization_config", None)
    path = spec.engine.model_path
    return config, config if path is None else _published("engine.model_path", path, directory)


def _published(key: str, path: Path, directory: Path) -> Config:
    file = directory / "models" / f"{path.name}.json"
    try:
        config: Config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds {type(config).__name__}, not an object")
        return config
    except (OSError, ValueError, RecursionError) as error:
        known = ", ".join(sorted(each.stem for each in file.parent.glob("*.json"))) or "none"
        raise UnsupportedModel(
            f"{key}: {path}: {file} cannot be read ({error}); --plan-only takes the model's config.json from there "
            f"(there are: {known})"
        ) from None


def _scale_faults(spec: RunSpec) -> Iterator[str]:
    """Of sizes that would take hours and all memory to look at."""
    sides = {
        "training.parallel (tensor * context * pipeline * data)": spec.training.parallel.world_size,
        "engine.replicas * engine.tensor_parallel": spec.engine_gpus,
        "cluster.gpus_per_node": spec.cluster.gpus_per_node,
    }
    for key, gpus in sides.items():
        if gpus > MOST_GPUS:
            yield f"{key} = {gpus} GPUs: a weight sync is planned for up to {MOST_GPUS}; lower it"


def _engine_faults(spec: RunSpec, config: Config, served: Config, model_tokens: int) -> Iterator[str]:
    if not spec.uses_engines:
        return
    yield from same_model_faults(spec, config, served)
    yield from list(engine_size_faults(spec, served, cuda=True))[:1] or placement_faults(spec, served, 1)
    yield from serving_faults(spec, model_tokens)
    trainer = spec.training.parallel.world_size
    yield from reach_faults(spec, _nodes(spec))
    yield from lasting_faults(spec)
    if spec.is_colocated and spec.engine_gpus > trainer:
        yield (
            f"engine.replicas * engine.tensor_parallel = {spec.engine_gpus} exceeds the trainer's {trainer} GPUs, "
            "which the engines share; lower one of them, or set cluster.placement: disaggregated"
        )


def sync_shape(spec: RunSpec, config: Config, served: Config, capabilities: Capabilities = GPUS) -> SyncShape:
    """What the planner wants to know of the run. Raises LayoutError."""
    train, engine = trainer_layout(config, spec.training.parallel, capabilities), engine_layout(spec.engine)
    topology = sync_topology(train.world_size, engine, spec.engine.replicas, spec.cluster.gpus_per_node)
    return SyncShape(served, train, engine, topology, DTYPES[spec.model.dtype], engine_form(served))


def _nodes(spec: RunSpec) -> int:
    return -(-spec.gpus // spec.cluster.gpus_per_node)


def _cluster(spec: RunSpec) -> Iterator[tuple[str, str]]:
    cluster = spec.cluster
    yield "cluster", f"{spec.gpus} GPUs on {_nodes(spec)} nodes of {cluster.gpus_per_node}, {cluster.placement}"


def _sync(shape: SyncShape, spec: RunSpec) -> Iterator[tuple[str, str]]:
    """The sync in which each GPU gets its own shards."""
    try:
        plan = make_plan(shape)
    except BlockCutError as error:
        if spec.sync.transport == "shards":
            raise
        yield "sync, shard to shard", f"not with this layout: {error}"
        return
    topology, bounds = plan.topology, plan.template.bounds
    at = f"at {topology.nic_bytes_per_s / 1e9:g} GB/s each way of a NIC, one for each GPU"
    yield "sync, one copy", f"{plan.template.model.wire_bytes / 1e9:,.1f} GB"
    if spec.is_colocated:
        seconds = colocated_ingress_bound(plan.template.atoms, topology)
        yield "sync, lower bound", f"{seconds:.3f} s {at}: what no GPU of a node holds already enters it once"
        return
    sent, received = plan.nic_bytes
    yield (
        "sync, most bytes of a NIC",
        f"{sent[: topology.trainer_ranks].max() / 1e9:.2f} GB sent by a trainer, "
        f"{received[topology.trainer_ranks :].max() / 1e9:.2f} GB received by an engine",
    )
    yield (
        "sync, lower bound",
        f"{bounds.seconds:.3f} s {at}, by the {bounds.binding} (trainer {bounds.egress_s:.3f}, engine "
        f"{bounds.ingress_s:.3f}, NVLink {bounds.fan_out_s:.3f})",
    )
