"""Colocated placement: trainer and engines take turns in the memory of the same GPUs.

Flows in: the trainer's wrapped chunks and optimizer, the engines. Flows out: nothing but moved memory.
Invariants: at every moment one side has the memory of a part; what the trainer gets back is bit for bit what it gave
away (gradients: zeros). A step out of order, or while communication runs, is refused before anything is moved; where
one fails, every rank learns of it and has its state whole.

    TRAINING --begin_sync--> SYNCING --begin_generation--> GENERATING --begin_training--> TRAINING
    trainer: all             weights                       nothing                        all
    engines: nothing         weights                       weights, KV cache              nothing

Every method is called on every trainer rank; the first rank alone speaks to the engines, between the moves of all.
Who holds the engines meanwhile, and when the turns are: `colocated.py`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist

from slimerl.engine.protocol import MemoryTag
from slimerl.training.fused_adam import inner_optimizers

logger = logging.getLogger(__name__)

Share = Callable[[str | None], list[str]]
"""Gives every rank the problems of all; returns once every rank has called it."""


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


class NotCopied(RuntimeError):
    """Bytes that are to be kept would be lost."""


class HandOverFailed(RuntimeError):
    """Memory could not be moved; end the run, and resume from its checkpoint."""


class SharingEngines(Protocol):
    """The engines on the trainer's GPUs, all at once (`colocated.LeasedEngines`). Every call returns when all that are
    left have done it, and raises a RuntimeError when none is left."""

    def release_memory(self, tags: Sequence[MemoryTag]) -> None: ...

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None: ...

    def serve(self) -> None:
        """Generate again, with the weights that were synced."""
        ...


class StowedStorage:
    """One storage whose bytes lie in host memory meanwhile. Every tensor that views it stays valid as an object and
    must not be read until `restore`."""

    def __init__(self, storage: torch.UntypedStorage, keep: bool) -> None:
        """`keep`: else it comes back as zeros."""
        self._storage = storage
        self._keep = keep
        self._nbytes = storage.nbytes()
        self._host: torch.Tensor | None = None
        self._copied = False
        """The host has what the storage holds now."""
        self.stowed = False

    @property
    def nbytes(self) -> int:
        """Of the device, when not stowed."""
        return self._nbytes

    @property
    def address(self) -> int:
        """On the device; 0 when stowed."""
        return self._storage.data_ptr()

    def copy_out(self) -> None:
        """Start the copy to the host; `free` after the device has been synchronised."""
        if not self._keep:
            return
        if self._host is None:  # kept for the next time: pinning memory takes longer than copying it
            pinned = self._storage.device.type == "cuda"
            self._host = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._host.copy_(self._bytes(), non_blocking=True)
        self._copied = True

    def free(self) -> None:
        """Raises NotCopied: the bytes are to be kept, and only the device has them."""
        self._check_copied("cannot be freed")
        self._storage.resize_(0)
        self.stowed = True

    def restore(self) -> None:
        """Raises NotCopied: the host does not have what the storage held."""
        if not self.stowed:
            raise NotCopied(f"a storage of {self._nbytes} bytes cannot be restored: it was not stowed")
        self._check_copied("cannot be restored")
        self._storage.resize_(self._nbytes)
        if self._host is None:
            self._bytes().zero_()
        else:
            self._bytes().copy_(self._host, non_blocking=True)
        self.stowed = self._copied = False

    def _check_copied(self, problem: str) -> None:
        if self._keep and not self._copied:
            raise NotCopied(f"a storage of {self._nbytes} bytes {problem}: it was not copied to the host (copy_out)")

    def _bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage, 0, (self._nbytes,))  # type: ignore[call-overload]


class TrainerParts:
    """What this rank can give away, in three parts. Megatron's own moves (`offload_to_cpu`) are not used: they
    replace the optimizer's tensors, which in float32 are views of the weights, and updates would miss the model."""

    def __init__(self, chunks: Sequence[Any], *optimizers: Any) -> None:
        """`chunks`: wrapped for training; of the critic, too, where there is one."""
        self._chunks, self._optimizers = chunks, optimizers
        self.weights: list[StowedStorage] = []
        self.gradients: list[StowedStorage] = []
        self.optimizer: list[StowedStorage] = []

    def find(self) -> None:
        """Look where everything lies, while it is on the device; anew each time: Adam's moments come into being with
        the first step, and a checkpoint that is loaded may bring new ones."""
        known = {each.address: each for each in self.all}
        buffers = [b for chunk in self._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        taken: set[int] = set()
        self.weights = _storages((b.param_data for b in buffers), known, taken, keep=True)
        self.gradients = _storages((b.grad_data for b in buffers), known, taken, keep=False)
        self.optimizer = _storages(
            chain.from_iterable(map(_optimizer_tensors, self._optimizers)), known, taken, keep=True
        )

    @property
    def all(self) -> list[StowedStorage]:
        return [*self.weights, *self.optimizer, *self.gradients]

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

    def __init__(self, parts: TrainerParts, engines: SharingEngines | None, share: Share) -> None:
        """
        Args:
            engines: on the first rank; None on the others. They must have released everything already, before the
                trainer's model was built.
            share: `share_problems`.
        """
        self._parts = parts
        self._engines = engines
        self._share = share
        self.phase = Phase.TRAINING

    def begin_sync(self) -> int:
        """After a training step: the engines get room for their weights. Returns the bytes that the trainer freed."""
        self._check(Phase.TRAINING, Phase.SYNCING)
        self._parts.find()
        freed = self._stow([*self._parts.optimizer, *self._parts.gradients])
        self._ask(lambda engines: engines.resume_memory([MemoryTag.WEIGHTS]))
        self.phase = Phase.SYNCING
        return freed

    def begin_generation(self) -> int:
        """After the sync: the engines get room for their KV cache, and go on. Returns the bytes that the trainer
        freed."""
        self._check(Phase.SYNCING, Phase.GENERATING)
        freed = self._stow(self._parts.weights)

        def go_on(engines: SharingEngines) -> None:
            engines.resume_memory([MemoryTag.KV_CACHE])
            engines.serve()

        self._ask(go_on)
        self.phase = Phase.GENERATING
        return freed

    def begin_training(self) -> None:
        """After the last token of a step: the engines, which must be held, give their memory back."""
        self._check(Phase.GENERATING, Phase.TRAINING)
        self._ask(lambda engines: engines.release_memory([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS]))
        self._all_succeed(_problem_of(lambda: restore(self._parts.all)))
        self.phase = Phase.TRAINING

    def fail(self, problem: str) -> None:
        """In place of the rest of a turn, on a rank that cannot go on: the others, which are at their next one or will
        be, raise HandOverFailed there. The trainer has its memory back then, as far as the device has room."""
        self.phase = Phase.FAILED
        self._share(problem)
        self._take_back()

    def _check(self, start: Phase, end: Phase) -> None:
        if self.phase is not start:
            raise OutOfOrder(f"memory cannot pass from {start} to {end}: the phase is {self.phase}")
        self._parts.check_idle()
        self.phase = Phase.FAILED  # until the turn has succeeded

    def _stow(self, storages: Sequence[StowedStorage]) -> int:
        """On every rank: none holds what the engines are about to take when this returns."""
        self._all_succeed(_problem_of(lambda: stow(storages)))
        return sum(storage.nbytes for storage in storages)

    def _ask(self, call: Callable[[SharingEngines], None]) -> None:
        """On the first rank; all ranks learn of a failure."""
        engines = self._engines
        problem = None if engines is None else _problem_of(lambda: call(engines))
        self._all_succeed(problem and f"the engines did not take part: {problem}")

    def _all_succeed(self, problem: str | None) -> None:
        """Raises HandOverFailed on every rank if one has a problem; the trainer has its memory back then."""
        if found := self._share(problem):
            self._take_back()
            raise HandOverFailed(f"memory could not be handed over: {'; '.join(found)}")

    def _take_back(self) -> None:
        """What cannot be restored, since the engines have its room, stays whole in host memory."""
        stowed = [each for each in self._parts.all if each.stowed]
        if problem := _problem_of(lambda: restore(stowed)):
            logger.error("the trainer's memory did not come back from the host: %s", problem)


def share_problems(problem: str | None) -> list[str]:
    """The problems of all ranks; returns once every rank has called it."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    return [f"rank {rank}: {each}" for rank, each in enumerate(found) if each is not None]


def _problem_of(move: Callable[[], object]) -> str | None:
    """What it raised, for the other ranks to hear of: of the fleet, the device (out of memory) or the host."""
    try:
        move()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Adam's moments and the float32 master weights."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)


def _storages(
    tensors: Iterator[torch.Tensor | None], known: Mapping[int, StowedStorage], taken: set[int], keep: bool
) -> list[StowedStorage]:
    """The storages of these tensors, each once, without those in `taken`, to which they are added.

    Args:
        known: by address, from an earlier look; they have their place in host memory already.
    """
    found = []
    for tensor in tensors:
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in taken:
            taken.add(storage.data_ptr())
            earlier = known.get(storage.data_ptr())
            same = earlier is not None and earlier.nbytes == storage.nbytes()
            found.append(earlier if earlier is not None and same else StowedStorage(storage, keep))
    return found


def _finish_device_work() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
