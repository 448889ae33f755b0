"""Where the disks of the nodes have something newer than the shared storage: which parts are whole, and their load.

Flows in: the note in the run directory, what each rank finds on its node. Flows out: a `LocalResumed`.
Invariant: parts are used where there is one of every rank, all of the same save, in the same layout, as digested when
they were written.
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
from slimerl.training.checkpoint.directory import Damaged, Entry, Manifest
from slimerl.training.checkpoint.local import Offers
from slimerl.training.checkpoint.local_copies import Move, fetch
from slimerl.training.checkpoint.local_tier import SOURCE
from slimerl.training.checkpoint.local_write import FORM
from slimerl.training.checkpoint.write import SaveFailed, agreed
from slimerl.training.parallel import Grid


@dataclass(frozen=True)
class Verified:
    """`manifest`: of this rank's part; `moves`: parts to be brought to ranks that lack them."""

    manifest: Manifest
    moves: tuple[Move, ...] = ()


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

    def verified(self, step: int, save: str) -> tuple[Verified | None, str]:
        """Called on every rank; what is wrong, or nothing."""
        there, rank = local.holders(self.offers, step, save), dist.get_rank()
        if missing := [owner for owner, ranks in there.items() if not ranks]:
            return None, f"the parts of rank {', '.join(map(str, missing))} are not on their nodes"
        where = directory.complete_path(self.root, step)
        own = _gathered(_checked(where, [rank] if rank in there[rank] else []))
        without = [owner for owner, (_, entries, _) in enumerate(own) if owner not in entries]
        copies = _gathered(_checked(where, [owner for owner in without if rank in there[owner] and rank != owner]))
        told = [f"rank {each}: {fault}" for each, found in enumerate(own) for fault in found[2]]
        told += [f"rank {each}: {fault}" for each, found in enumerate(copies) for fault in found[2]]
        moves = []
        for owner in without:
            having = [(holder, found[1][owner]) for holder, found in enumerate(copies) if owner in found[1]]
            if not having:
                return None, directory.described(told or [f"no copy of the part of rank {owner} is whole"])
            moves.append(Move(owner, *having[0]))
        manifest = own[rank][0] or next(found[0] for found in (*own, *copies) if found[0] is not None)
        return Verified(manifest, tuple(moves)), directory.described(told)


_Checked = tuple[Manifest | None, dict[int, Entry], list[str]]
"""The manifest of a directory, the parts in it that are whole, by owner, and what is wrong with others."""


def _checked(where: Path, owners: Sequence[int]) -> _Checked:
    """Args: `owners`: whose parts to look at."""
    if not owners:
        return None, {}, []
    try:
        manifest = directory.read_manifest(where)
    except Damaged as error:
        return None, {}, [str(error)]
    entries, faults = {}, []
    for owner in owners:
        name = local.part_name(owner)
        if found := directory.faults(where, {name: manifest.files[name]}):
            faults += found
        else:
            entries[owner] = manifest.files[name]
    return manifest, entries, faults


def _gathered(own: _Checked) -> list[_Checked]:
    """Of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def look(spec: RunSpec, grid: Grid, run: str) -> Near:
    """Called on every rank. Args: `run`: of the note."""
    assert spec.checkpoint.local_dir is not None
    root = local.rank_root(spec.checkpoint.local_dir, run, grid.rank)
    offers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, local.offered(root, run, spec.training.parallel.model_dump(), FORM))
    return Near(root, offers)


def load(where: Path, found: Verified, state: TrainedState, grid: Grid, updates: int, warmup_updates: int) -> bytes:
    """Take this rank's part, which a rank that lacks it gets from another; called on every rank.

    Returns:
        What the source of samples has to know to go on; of the first rank.

    Raises:
        ResumeError: some rank cannot; on every rank.
    """
    try:
        if found.moves:
            agreed(lambda: fetch(where.parent, found.manifest, found.moves, grid.device), "bring the parts of")
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
