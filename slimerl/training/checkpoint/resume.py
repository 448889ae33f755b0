"""Where a trainer goes on: the newest checkpoint that is what was written, on the shared storage or on the nodes.

Flows in: the run's checkpoints. Flows out: a `Resumed`, or None where the run begins.
Invariant: a checkpoint is used whole or not at all; none is passed over in silence; where some exist and none is
whole, the run does not begin anew by itself, unless all that there was has gone with a node.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slimerl.spec import RunSpec
from slimerl.training.checkpoint import directory, local, local_resume
from slimerl.training.checkpoint.checkpointer import SOURCE_FILE, checkpoint_root
from slimerl.training.checkpoint.content import ResumeError, TrainedState
from slimerl.training.checkpoint.directory import Damaged, Manifest
from slimerl.training.checkpoint.identity import changes
from slimerl.training.checkpoint.local import Note, Place
from slimerl.training.checkpoint.local_resume import Near, Verified
from slimerl.training.checkpoint.write import ranks_agree_on
from slimerl.training.parallel import Grid

logger = logging.getLogger(__name__)

_LOCAL = "local"
"""Begins what is said of a local one."""


@dataclass(frozen=True)
class Resumed:
    """`rejected`: newer checkpoints that were damaged, each with what is wrong with it; `parts`: of one that
    lies on the nodes."""

    directory: Path
    manifest: Manifest
    rejected: Sequence[str] = ()
    parts: Verified | None = None

    @property
    def is_local(self) -> bool:
        return self.parts is not None

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True)
class Newest:
    """Steps of the newest checkpoint of each kind; 0: there is none."""

    shared: int = 0
    local: int = 0


def newest(resumed: Resumed | None, spec: RunSpec) -> Newest:
    """As a run begins, or goes on from `resumed`."""
    if resumed is None or not resumed.is_local:
        return Newest(shared=resumed.step if resumed is not None else 0)
    older = [step for step in directory.complete_steps(checkpoint_root(spec)) if step <= resumed.step]
    return Newest(max(older, default=0), resumed.step)


def find(spec: RunSpec, grid: Grid, identity: Mapping[str, Any]) -> Resumed | None:
    """Choose; called on every rank.

    Args:
        identity: of the run that is to go on.

    Raises:
        ResumeError: there are checkpoints, but none can be used, the spec says not to, or is of fewer steps.
    """
    root = checkpoint_root(spec)
    steps, partial, unusable, note, against = ranks_agree_on(_seen(spec, root) if grid.is_first else None)
    if partial and grid.is_first:
        logger.warning("%s: passed over, as they were never completed: %s", root, ", ".join(partial))
    if unusable and grid.is_first:
        logger.error("%s: passed over, as they are no checkpoints that can be used: %s", root, ", ".join(unusable))
    if against and grid.is_first and note.step > max(steps, default=0):
        logger.error("the local checkpoint of step %d is passed over: %s", note.step, against)
    near = _near(spec, grid, note) if note is not None and not against else None
    saves = near.saves if near is not None else []
    if (steps or saves) and spec.checkpoint.resume == "never":
        raise ResumeError(f"{root} holds checkpoints, but checkpoint.resume is never; start anew with --fresh")
    rejected: list[str] = []
    for step, save in local.in_order(steps, saves):
        found, fault = _tried(root, step, save, near, grid)
        if found is not None:
            found = replace(found, rejected=rejected)
            _check_identity(found, identity)
            _check_steps(found, spec.training.steps)
            return found
        rejected.append(fault)
        if grid.is_first:
            logger.error("checkpoint of %s is damaged and not used: %s", root, fault)
    _refuse_to_begin_anew(root, steps, unusable, rejected, note, near, against)
    if note is not None and note.step and grid.is_first:
        lost = "; ".join(rejected) or "nothing of it is on the nodes"
        logger.error("the run begins anew: it had a local checkpoint of step %d alone, and %s", note.step, lost)
    return None


def _seen(spec: RunSpec, root: Path) -> tuple[list[int], list[str], list[str], Note | None, str]:
    """Complete, partial and unusable checkpoints of the run directory, the note, and what is against its use."""
    note = local.read_note(root)
    against = _against(note, spec) if note is not None else ""
    return directory.complete_steps(root), directory.partial_names(root), local.unusable_names(root), note, against


def _against(note: Note, spec: RunSpec) -> str:
    """Why the run has no part in the local checkpoints that the note is of; empty: it has."""
    if note.local_dir != str(spec.checkpoint.local_dir):
        return f"it is in {note.local_dir}, but checkpoint.local_dir is {spec.checkpoint.local_dir}"
    if not note.place.is_of(Place.of(spec.run_dir)):
        return f"it is of the run in {note.place.path}, of which this is a copy"
    return ""


def _near(spec: RunSpec, grid: Grid, note: Note) -> Near:
    """What the nodes hold of the run, told where it cannot be used."""
    near = local_resume.look(spec, grid, note.run)
    for fault in near.passed_over if grid.is_first else ():
        logger.error("a local checkpoint is passed over: %s", fault)
    return near


def _tried(root: Path, step: int, save: str | None, near: Near | None, grid: Grid) -> tuple[Resumed | None, str]:
    """One of them, or what is wrong with it. Args: `save`: of a local one."""
    if save is None or near is None:
        path = directory.complete_path(root, step)
        manifest, fault = verified(path, grid)
        if manifest is not None and manifest.step == step:
            return Resumed(path, manifest), ""
        return None, f"step-{step}: {fault or 'its manifest is of another step'}"
    parts, fault = near.verified(step, save)
    if parts is None:
        return None, f"{_LOCAL} step-{step}: {fault}"
    if parts.moves and grid.is_first:
        lacking = ", ".join(str(move.owner) for move in parts.moves)
        logger.warning(
            "local step-%d: copies take the place of the parts of rank %s: %s", step, lacking, fault or "lost"
        )
    return Resumed(directory.complete_path(near.root, step), parts.manifest, parts=parts), ""


def _refuse_to_begin_anew(
    root: Path,
    steps: Sequence[int],
    unusable: Sequence[str],
    rejected: Sequence[str],
    note: Note | None,
    near: Near | None,
    against: str,
) -> None:
    """Raises ResumeError: something may be brought back, or be used with other settings."""
    anew = "or start anew with --fresh"
    if steps:
        raise ResumeError(
            f"none of the checkpoints in {root} is whole: {'; '.join(rejected)}. Bring one back from a copy, {anew}"
        )
    if unusable:
        raise ResumeError(
            f"{root} holds no checkpoint that can be used, only {', '.join(unusable)}. Bring one back from a copy, "
            f"{anew}"
        )
    if note is None or not note.step:
        return
    if against:
        raise ResumeError(f"the only checkpoint of the run is a local one: {against}; set it back, {anew}")
    if near is not None and near.unfit:
        raise ResumeError(
            f"the only checkpoint of the run is a local one, which cannot be used: {directory.described(near.unfit)}. "
            f"Set it back, {anew}"
        )


def load(found: Resumed, state: TrainedState, spec: RunSpec, grid: Grid) -> bytes:
    """Take the trained state from it; called on every rank.

    Returns:
        What the source of samples has to know to go on; of the first rank.

    Raises:
        ResumeError
    """
    same_layout = found.manifest.layout == spec.training.parallel.model_dump()
    warmup = min(found.step, spec.algorithm.value_warmup_steps) * spec.training.minibatches_per_step
    updates = found.step * spec.training.minibatches_per_step
    if found.parts is not None:
        source = local_resume.load(found.directory, found.parts, state, grid, updates, warmup)
    else:
        state.load(found.directory, updates, same_layout, warmup)
        source = (found.directory / SOURCE_FILE).read_bytes()
    if not grid.is_first:
        return source
    root = checkpoint_root(spec)
    for each in found.rejected:
        # otherwise it would be found damaged again, and its step be written a second time beside it
        if not each.startswith(_LOCAL):
            directory.set_aside(root, int(each.partition(":")[0].removeprefix("step-")))
    used = f"; used instead of {', '.join(found.rejected)}" if found.rejected else ""
    random = "" if same_layout else "; written by another layout, so random numbers start from the seed"
    logger.info("going on from %s%s%s", found.directory, used, random)
    return source


def verified(path: Path, grid: Grid) -> tuple[Manifest | None, str]:
    """The manifest and nothing, or nothing and what is wrong. Called on every rank; they share the reading."""
    manifest, fault = ranks_agree_on(_manifest(path) if grid.is_first else None)
    if manifest is None:
        return None, fault
    ranks = dist.get_world_size()
    found: list[list[str]] = [[] for _ in range(ranks)]
    dist.all_gather_object(found, directory.faults(path, manifest.files, grid.rank, ranks))
    faults = [fault for part in found for fault in part]
    return (None, directory.described(faults)) if faults else (manifest, "")


def _manifest(path: Path) -> tuple[Manifest | None, str]:
    try:
        return directory.read_manifest(path), ""
    except Damaged as error:
        return None, str(error)


def _check_steps(found: Resumed, steps: int) -> None:
    """Otherwise a model that has seen more steps would be exported as that of fewer."""
    if found.step > steps:
        raise ResumeError(
            f"{found.directory} is of step {found.step}, but training.steps = {steps}; raise it to {found.step} or "
            "more, start anew with --fresh, or set output_dir=…"
        )


def _check_identity(found: Resumed, now: Mapping[str, Any]) -> None:
    if changed := changes(found.manifest.identity, now):
        raise ResumeError(
            f"{found.directory} is of another run: {'; '.join(changed)}. Set it back, start anew with --fresh, or set "
            "output_dir=… (with model.megatron_path this checkpoint, to start from its weights)"
        )
