"""Where the disks of the nodes have something newer than the shared storage: which parts are whole, and their load.

Flows in: the note in the run directory, what each rank finds on its node. Flows out: a `LocalResumed`.
Invariant: parts are used where all ranks have theirs of the same save, in the same layout, as digested when written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slimerl.spec import RunSpec
from slimerl.training.checkpoint import directory, local
from slimerl.training.checkpoint.content import ResumeError, TrainedState
from slimerl.training.checkpoint.directory import Damaged, Manifest
from slimerl.training.checkpoint.local import Offers
from slimerl.training.checkpoint.local_tier import SOURCE
from slimerl.training.checkpoint.local_write import FORM
from slimerl.training.checkpoint.write import SaveFailed, agreed
from slimerl.training.parallel import Grid


@dataclass(frozen=True)
class Near:
    """What lies on the nodes, as every rank knows it. `root`: this rank's directory; `offers`: of each rank."""

    root: Path
    offers: Sequence[Offers]

    @property
    def saves(self) -> list[tuple[int, str]]:
        return local.saves(self.offers)

    @property
    def passed_over(self) -> list[str]:
        """What the disks hold that is not used, whatever its digests say."""
        return [fault for each in self.offers for fault in (*each.damaged, *each.unfit)]

    @property
    def unfit(self) -> list[str]:
        return [fault for each in self.offers for fault in each.unfit]

    def verified(self, step: int, save: str) -> tuple[Manifest | None, str]:
        """The manifest of this rank's part and nothing, or nothing and what is wrong; called on every rank."""
        if missing := local.lacking(self.offers, step, save):
            return None, f"the parts of rank {', '.join(map(str, missing))} are not on their nodes"
        manifest, faults = _checked(directory.complete_path(self.root, step))
        found: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, [f"rank {dist.get_rank()}: {fault}" for fault in faults])
        told = [fault for part in found for fault in part]
        return (None, directory.described(told)) if told else (manifest, "")


def _checked(where: Path) -> tuple[Manifest | None, list[str]]:
    try:
        manifest = directory.read_manifest(where)
    except Damaged as error:
        return None, [str(error)]
    return manifest, directory.faults(where, manifest.files)


def look(spec: RunSpec, grid: Grid, run: str) -> Near:
    """Called on every rank. Args: `run`: of the note."""
    assert spec.checkpoint.local_dir is not None
    root = local.rank_root(spec.checkpoint.local_dir, run, grid.rank)
    offers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, local.offered(root, run, spec.training.parallel.model_dump(), FORM))
    return Near(root, offers)


def load(where: Path, state: TrainedState, grid: Grid, updates: int, warmup_updates: int) -> bytes:
    """Take this rank's part; called on every rank.

    Returns:
        What the source of samples has to know to go on; of the first rank.

    Raises:
        ResumeError: some rank cannot; on every rank.
    """
    try:
        loaded = agreed(lambda: _read(where / local.part_name(grid.rank), state), "load")
    except SaveFailed as failure:
        raise ResumeError(f"{where}: {failure}; remove {where.parent.parent}, to go on from an older one") from failure
    state.take(where, loaded, updates, True, warmup_updates)
    source: bytes = loaded[SOURCE]
    return source


def _read(part: Path, state: TrainedState) -> dict[str, Any]:
    # its digest is that of what this run wrote
    kept = torch.load(part, map_location="cpu", weights_only=False)
    tree: dict[str, Any] = kept.to_state_dict(
        state.tree(loading=True, only_own=True), algo="atomic", validate_access_integrity=False
    )
    return tree
