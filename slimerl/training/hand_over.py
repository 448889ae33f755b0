"""Colocated placement: trainer and engines take turns in the memory of the same GPUs.

Flows in: the trainer's wrapped chunks and optimizer, the engines. Flows out: nothing but moved memory.
Invariants: at every moment one side has the memory of a part; what the trainer gets back is bit for bit what it gave
away (gradients: zeros). A step out of order, or while communication runs, is refused before anything is moved.

    TRAINING --begin_sync--> SYNCING --begin_generation--> GENERATING --begin_training--> TRAINING
    trainer: all             weights                       nothing                        all
    engines: nothing         weights                       weights, KV cache              nothing

Every method is called on every trainer rank; the first rank alone speaks to the engines, between the moves of all.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from slimerl.engine.protocol import MemoryTag
from slimerl.training.fused_adam import inner_optimizers


class Phase(StrEnum):
    TRAINING = "training"
    SYNCING = "syncing"
    GENERATING = "generating"
    FAILED = "failed"
    """A move failed half-way: who has which memory is not known any more."""


class OutOfOrder(RuntimeError):
    """The memory is not where this step expects it."""


class TrainerBusy(RuntimeError):
    """The trainer's memory is still being read or written."""


class HandOverFailed(RuntimeError):
    """Memory could not be moved; end the run, and resume from its checkpoint."""


class EngineMemory(Protocol):
    """`EngineFleet`: gives up or takes back memory in every engine, and returns when it has."""

    def release_memory(self, tags: Sequence[MemoryTag]) -> None: ...

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None: ...


class StowedStorage:
    """One storage whose bytes lie in host memory meanwhile. Every tensor that views it stays valid as an object and
    must not be read until `restore`."""

    def __init__(self, storage: torch.UntypedStorage, keep: bool) -> None:
        """`keep`: else it comes back as zeros."""
        self._storage = storage
        self._keep = keep
        self._nbytes = storage.nbytes()
        self._host: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of the device, when not stowed."""
        return self._nbytes

    def copy_out(self) -> None:
        """Start the copy to the host; `free` after the device has been synchronised."""
        if not self._keep:
            return
        if self._host is None:  # kept for the next time: pinning memory takes longer than copying it
            pinned = self._storage.device.type == "cuda"
            self._host = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._host.copy_(self._bytes(), non_blocking=True)

    def free(self) -> None:
        self._storage.resize_(0)

    def restore(self) -> None:
        self._storage.resize_(self._nbytes)
        if self._host is None:
            self._bytes().zero_()
        else:
            self._bytes().copy_(self._host, non_blocking=True)

    def _bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage, 0, (self._nbytes,))  # type: ignore[call-overload]


class TrainerMemory:
    """What this rank can give away, in three parts. Megatron's own moves (`offload_to_cpu`) are not used: they
    replace the optimizer's tensors, which in float32 are views of the weights, and updates would miss the model."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """`chunks`: wrapped for training. Adam's moments exist from the first step on: make this after it, or they
        stay on the device."""
        self._chunks = chunks
        buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        taken: set[int] = set()
        self.weights = _storages((b.param_data for b in buffers), taken, keep=True)
        self.gradients = _storages((b.grad_data for b in buffers), taken, keep=False)
        self.optimizer = _storages(_optimizer_tensors(optimizer), taken, keep=True)

    def check_idle(self) -> None:
        """Raises TrainerBusy while gradients are being reduced or parameters gathered."""
        for index, chunk in enumerate(self._chunks):
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                for what, handle in (
                    ("gradients are being reduced", group.grad_reduce_handle),
                    ("parameters are being gathered", group.param_gather_handle),
                ):
                    if handle is not None:
                        raise TrainerBusy(f"model chunk {index}: {what}; hand memory over between training steps only")


def stow(storages: Sequence[StowedStorage]) -> int:
    """Move to the host; returns the bytes freed on the device."""
    for storage in storages:
        storage.copy_out()
    _finish_device_work()
    for storage in storages:
        storage.free()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the allocator would keep it from the engines
    return sum(storage.nbytes for storage in storages)


def restore(storages: Sequence[StowedStorage]) -> None:
    for storage in storages:
        storage.restore()
    _finish_device_work()


class HandOver:
    """The turns of trainer and engines; see the module."""

    def __init__(
        self, memory: TrainerMemory, engines: EngineMemory | None, broadcast: Callable[[list[str | None]], None]
    ) -> None:
        """
        Args:
            engines: on the first rank; None on the others. They must have released everything already, before the
                trainer's model was built.
            broadcast: gives every rank the first rank's list of one entry (`first_rank_tells`).
        """
        self._memory = memory
        self._engines = engines
        self._broadcast = broadcast
        self.phase = Phase.TRAINING

    def begin_sync(self) -> int:
        """After a training step: the engines get room for their weights. Returns the bytes that the trainer freed."""

        def move() -> int:
            freed = stow([*self._memory.optimizer, *self._memory.gradients])
            self._ask_engines(lambda engines: engines.resume_memory([MemoryTag.WEIGHTS]))
            return freed

        return self._turn(Phase.TRAINING, Phase.SYNCING, move)

    def begin_generation(self) -> int:
        """After the sync: the engines get room for their KV cache. Returns the bytes that the trainer freed."""

        def move() -> int:
            freed = stow(self._memory.weights)
            self._ask_engines(lambda engines: engines.resume_memory([MemoryTag.KV_CACHE]))
            return freed

        return self._turn(Phase.SYNCING, Phase.GENERATING, move)

    def begin_training(self) -> None:
        """After the last token of a step: the engines, which must have been paused, give their memory back."""

        def move() -> int:
            self._ask_engines(lambda engines: engines.release_memory([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS]))
            restore([*self._memory.weights, *self._memory.optimizer, *self._memory.gradients])
            return 0

        self._turn(Phase.GENERATING, Phase.TRAINING, move)

    def _turn(self, start: Phase, end: Phase, move: Callable[[], int]) -> int:
        if self.phase is not start:
            raise OutOfOrder(f"memory cannot pass from {start} to {end}: the phase is {self.phase}")
        self._memory.check_idle()
        self.phase = Phase.FAILED
        freed = move()
        self.phase = end
        return freed

    def _ask_engines(self, call: Callable[[EngineMemory], None]) -> None:
        """On the first rank, once every rank has moved its own; all ranks learn of a failure."""
        problem: list[str | None] = [None]
        self._broadcast(problem)  # every rank is here: none still holds what the engines are about to take
        if self._engines is not None:
            try:
                call(self._engines)
            except RuntimeError as error:  # of the fleet; the other ranks wait to hear of it
                problem = [f"{type(error).__name__}: {error}"]
        self._broadcast(problem)
        if problem[0] is not None:
            raise HandOverFailed(f"the engines did not take part in the hand-over of memory: {problem[0]}")


def first_rank_tells(message: list[str | None]) -> None:
    """`broadcast` of a run: returns once all ranks have called it."""
    dist.barrier()
    dist.broadcast_object_list(message, src=0)


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Adam's moments and the float32 master weights."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)


def _storages(tensors: Iterator[torch.Tensor | None], taken: set[int], keep: bool) -> list[StowedStorage]:
    """The storages of these tensors, each once, without those in `taken`, to which they are added."""
    found = []
    for tensor in tensors:
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in taken:
            taken.add(storage.data_ptr())
            found.append(StowedStorage(storage, keep))
    return found


def _finish_device_work() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
