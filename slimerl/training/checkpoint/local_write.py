"""The write of one local checkpoint: each rank's part, by a child of its own, to the disk of its node.

Flows in: the state as Megatron's tree. Flows out: `step-N` in each rank's directory, or `SaveFailed` on every rank.
Invariants: as of `write.py`: the children see the state as it was when they were forked; whoever fails, all ranks learn
of it at the same place; a step is whole on all ranks before an older one goes.

Of nvidia-resiliency-ext, the form of a rank's state is used (Megatron's `MCoreTensorAwareStateDict`, made for it), and
what brings it to other nodes (`local_copies.py`). Its checkpoint manager is not: it keeps no digests and loads what a
flipped bit has made of a tensor; where a rank cannot write, the others wait in a barrier for the timeout of the process
group; its asynchronous save needs CUDA, and writes in processes that outlive a trainer that is killed.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

from slimerl.resilience.deadline import Deadline
from slimerl.training.checkpoint import directory, local
from slimerl.training.checkpoint.directory import Entry, Manifest
from slimerl.training.checkpoint.local_copies import Copies
from slimerl.training.checkpoint.write import Child, Writing, agreed, wait_until_ended

FORM = f"torch {torch.__version__}, megatron-core {megatron.core.__version__}"
"""What pickled a part: another version may not read it, or not as it was meant."""


class LocalWrite(Writing):
    """One local checkpoint under way. Every method is called on every rank."""

    def __init__(
        self,
        root: Path,
        step: int,
        tree: dict[str, Any],
        device: torch.device,
        manifest: Callable[[dict[str, Entry]], Manifest],
        copies: Copies | None = None,
    ) -> None:
        """Start writing; returns as soon as the state may change again.

        Args:
            root: of this rank.
            tree: `TrainedState.tree` of what this rank has, with whatever else it needs.
            manifest: of the files that it consists of.
            copies: whose parts this rank keeps beside its own.

        Raises:
            SaveFailed
        """
        super().__init__(root, step, device)
        self._manifest = manifest
        with self._given_up_on_failure():
            agreed(lambda: directory.start_partial(root, step), "start")
            part = agreed(lambda: part_of(tree), "prepare")
            parts = agreed(lambda: _on_host(part, device, copies), "copy")
            agreed(lambda: self._start_child(parts), "start the writer of")

    def finish(self, deadline: Deadline, noted: Callable[[], None]) -> float:
        """Wait until all have written, then make it a checkpoint.

        Args:
            noted: of rank 0, once all ranks have it.

        Returns:
            Seconds from the start to here.

        Raises:
            SaveFailed: nothing of it is left.
        """
        child = self._child
        assert child is not None
        with self._given_up_on_failure():
            wait_until_ended(child, self._device, deadline)
            agreed(child.check, "write")
            agreed(self._complete, "complete")
            agreed(noted if dist.get_rank() == 0 else (lambda: None), "note")
        return time.monotonic() - self._begun

    def abandon(self) -> None:
        self.kill()
        directory.remove_partial(self._root, self.step)
        shutil.rmtree(directory.complete_path(self._root, self.step), ignore_errors=True)

    def _start_child(self, parts: Mapping[int, MCoreTensorAwareStateDict]) -> None:
        self._child = Child(lambda: self._write(parts))

    def _write(self, parts: Mapping[int, MCoreTensorAwareStateDict]) -> None:
        """In the child: the parts, flushed and read back for their digests, and the manifest."""
        partial, files = directory.partial_path(self._root, self.step), {}
        for owner, part in parts.items():
            path = partial / local.part_name(owner)
            with path.open("wb") as file:
                torch.save(part, file)
                directory.flush(file)
            files[path.name] = directory.entry_of(path)
        directory.write_manifest(partial, self._manifest(files))

    def _complete(self) -> None:
        directory.complete(self._root, self.step)


def part_of(tree: dict[str, Any]) -> MCoreTensorAwareStateDict:
    """What this rank has; waits for nobody (the class's own constructor does, and checks what the same layout cannot
    have changed)."""
    sharded, common = save_preprocess(tree, validate_access_integrity=False)
    for each in nested_values(sharded):
        if isinstance(each, ShardedTensor) and each.data is not None:
            # what travels has to be
            each.data = each.data.contiguous()
    return MCoreTensorAwareStateDict(common=common, sharded_state_dict=sharded)


def _on_host(
    part: MCoreTensorAwareStateDict, device: torch.device, copies: Copies | None
) -> Mapping[int, MCoreTensorAwareStateDict]:
    """By their owners."""
    if copies is not None:
        parts = copies.of(part)
    else:
        parts = {dist.get_rank(): part}
        if device.type == "cuda":
            # elsewhere the fork is the snapshot
            part.copy_tensors_to_cpu(non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return parts
