"""This machine against the spec: versions, GPUs, the port, memory.

Flows in: the spec, the parsed `config.json`, what the machine offers. Flows out: faults.
"""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from slimerl.conductor.estimate import RunEstimate, estimate
from slimerl.conductor.preflight.disk import free_bytes
from slimerl.conductor.preflight.scored import critic_config
from slimerl.conductor.reach import lasting_faults
from slimerl.conductor.versions import COPIES_PINS, ENGINE_PINS, TRAINER_PINS, version_fault
from slimerl.engine.local_resources import NoAddress, own_address
from slimerl.resilience.rank_monitor import is_installed
from slimerl.spec import RunSpec
from slimerl.training.capabilities import Capabilities
from slimerl.training.engine_layout import engine_config
from slimerl.training.in_process_faults import in_process_faults
from slimerl.training.memory_estimate import GIB, SERVER_RUNTIME_BYTES, EngineMemory

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")


def version_faults(spec: RunSpec) -> list[str]:
    """Packages whose inside slimerl relies on."""
    pins = TRAINER_PINS | (ENGINE_PINS if spec.uses_engines else {})
    if spec.checkpoint.local_copies > 1:
        pins |= COPIES_PINS
    return [fault for package, pin in pins.items() if (fault := version_fault(package, pin))]


def machine_faults(spec: RunSpec, config: Mapping[str, Any] | None, capabilities: Capabilities) -> Iterator[str]:
    """Without a `config` (no sound model) memory is not estimated."""
    yield from _port_faults(spec)
    yield from in_process_faults(spec, capabilities.cuda, is_installed())
    if capabilities.cuda:
        yield from gpu_faults(spec, torch.cuda.device_count())
        yield from lasting_faults(spec)
    if config is not None:
        needed = estimate(spec, config, capabilities, engine_config(spec, config), critic_config(spec))
        if capabilities.cuda:
            yield from gpu_memory_faults(needed, min(_gpu_memory_bytes()), spec.is_colocated)
            yield from sent_state_faults(needed, available_memory_bytes())
        else:
            yield from memory_faults(spec, needed, available_memory_bytes())
        yield from _shared_memory_faults(needed)


def gpu_faults(spec: RunSpec, visible: int) -> Iterator[str]:
    """Every trainer rank has a GPU of its own, and every engine rank; colocated, both count from the first GPU, so that
    a trainer and an engine rank share one."""
    ranks, engine = spec.training.parallel.world_size, spec.engine
    if not spec.is_colocated and spec.gpus > visible:
        yield (
            f"cluster.placement = disaggregated asks for {ranks} GPUs of the trainer and {spec.engine_gpus} of the "
            f"engines, but {visible} are visible; lower one of them, or set cluster.placement: colocated"
        )
        return
    if ranks > visible:
        yield (
            f"training.parallel asks for {ranks} GPUs (tensor * context * pipeline * data), but {visible} are visible; "
            "lower it, or set CUDA_VISIBLE_DEVICES"
        )
    if spec.engine_gpus > visible:
        yield (
            f"engine.replicas * engine.tensor_parallel = {engine.replicas} * {engine.tensor_parallel} asks for "
            f"{spec.engine_gpus} GPUs, but {visible} are visible; lower one of them, or set CUDA_VISIBLE_DEVICES"
        )


def _gpu_memory_bytes() -> list[int]:
    return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]


def gpu_memory_faults(needed: RunEstimate, each: int, colocated: bool = True) -> Iterator[str]:
    """Each moment of a step on its own: colocated, trainer and engine hand most of their memory to each other.

    Args:
        each: memory of the smallest GPU.
        colocated: a trainer and an engine rank share one.
    """
    trainer, engine = needed.trainer, needed.engine
    if engine is not None:
        yield from _engine_memory_faults(engine, trainer.kept if colocated else 0, each)
    kept = engine.kept if colocated and engine is not None else 0
    if trainer.total + kept > each:
        beside = f" beside the {kept / GIB:.1f} GiB that an engine rank keeps" if kept else ""
        yield (
            f"a trainer rank needs about {trainer.total / GIB:.1f} GiB ({_parts(needed)}){beside}, a GPU has "
            f"{each / GIB:.1f}; {_TRAINER_REMEDY}"
        )
    if engine is None or not colocated:
        return
    both = trainer.weights + trainer.kept + engine.weights + engine.kept + needed.sync_buckets
    if both > each:
        yield (
            f"during a sync the weights of a trainer rank ({trainer.weights / GIB:.1f} GiB) and of an engine rank "
            f"({engine.weights / GIB:.1f}) lie on the same GPU, {both / GIB:.1f} GiB with what else is there, which "
            f"has {each / GIB:.1f}; spread the model over more ranks (training.parallel), {_ENGINE_REMEDY}, or set "
            "cluster.placement: disaggregated"
        )


def _engine_memory_faults(engine: EngineMemory, kept: int, each: int) -> Iterator[str]:
    """`kept`: by a trainer rank on the same GPU, while the engine generates."""
    if engine.total + kept > each:
        beside = f" beside the {kept / GIB:.1f} GiB that a trainer rank keeps" if kept else ""
        yield (
            f"an engine rank needs about {engine.total / GIB:.1f} GiB{beside}, a GPU has {each / GIB:.1f}; lower "
            f"engine.max_total_tokens, or {_ENGINE_REMEDY}"
        )


_ENGINE_REMEDY = "raise engine.tensor_parallel or engine.expert_parallel"

_TRAINER_REMEDY = (
    "lower training.micro_batch_tokens, set training.recompute: full, or spread the model over more ranks "
    "(training.parallel)"
)


def memory_faults(spec: RunSpec, needed: RunEstimate, available: int) -> Iterator[str]:
    """Without CUDA every role lives in the same memory. `available`: bytes."""
    if needed.host <= available:
        return
    ranks = spec.training.parallel.world_size
    roles = f"{ranks} trainer ranks of {needed.trainer.total / GIB:.1f} ({_parts(needed)})"
    if needed.engine is not None:
        each = (spec.engine.tensor_parallel * needed.engine.total + SERVER_RUNTIME_BYTES) / GIB
        roles += f", {spec.engine.replicas} engines of {each:.1f}"
    yield (
        f"the run needs about {needed.host / GIB:.1f} GiB of memory ({roles}), {available / GIB:.1f} GiB are "
        f"available; end other programs, {_TRAINER_REMEDY}, or lower engine.max_total_tokens or engine.replicas"
    )


def _parts(needed: RunEstimate) -> str:
    trainer = needed.trainer
    parts = {
        "weights": trainer.weights,
        "gradients": trainer.gradients,
        "optimizer": trainer.optimizer,
        "activations": trainer.activations,
    }
    if trainer.reference:
        parts["reference model"] = trainer.reference
    if trainer.critic:
        parts["critic"] = trainer.critic
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())


def sent_state_faults(needed: RunEstimate, available: int) -> Iterator[str]:
    """With CUDA the host has to hold little else. `available`: bytes of host memory."""
    if needed.sent_state > available:
        yield (
            f"sync.transport = delta keeps {needed.sent_state / GIB:.1f} GiB in host memory, {available / GIB:.1f} GiB "
            "are available; lower sync.bucket_mib, or set sync.transport to broadcast"
        )


def available_memory_bytes() -> int:
    """What programs may still take: of the machine, or of the container where that is less."""
    available = psutil.virtual_memory().available
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return available if limit == "max" else min(available, max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        return available  # no cgroup of version 2


def _shared_memory_faults(needed: RunEstimate) -> Iterator[str]:
    if needed.shared_memory and (free := free_bytes(SHARED_MEMORY)) < needed.shared_memory:
        yield (
            f"sync.bucket_mib: the weights travel through {needed.shared_memory / GIB:.2f} GiB in {SHARED_MEMORY}, "
            f"which has {free / GIB:.2f} GiB free; lower sync.bucket_mib, or enlarge it (docker run --shm-size)"
        )


def _port_faults(spec: RunSpec) -> Iterator[str]:
    port = spec.rollout.port
    if not spec.uses_engines:
        return
    try:
        host = own_address(spec.cluster.network)
    except NoAddress as error:
        yield f"cluster.network = {spec.cluster.network}: {error}"
        return
    if port == 0:
        return
    with socket.socket() as probe:
        # as the control service binds it: a port in TIME_WAIT is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            yield f"rollout.port = {port}: {error.strerror} on {host}; set another, or 0 for a free one"
