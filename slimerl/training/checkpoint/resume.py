"""Where a trainer goes on: the newest checkpoint that is what was written.

Flows in: the run's checkpoints. Flows out: a `Resumed`, or None where the run begins.
Invariant: a checkpoint is used whole or not at all; none is passed over in silence; where some exist and none is
whole, the run does not begin anew by itself.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slimerl.spec import RunSpec
from slimerl.training.checkpoint import directory
from slimerl.training.checkpoint.checkpointer import SOURCE_FILE, checkpoint_root, ranks_agree_on
from slimerl.training.checkpoint.content import ResumeError, TrainedState
from slimerl.training.checkpoint.directory import Damaged, Manifest
from slimerl.training.checkpoint.identity import changes
from slimerl.training.parallel import Grid

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """`rejected`: newer checkpoints that were damaged, each with what is wrong with it."""

    directory: Path
    manifest: Manifest
    rejected: Sequence[str] = ()

    @property
    def step(self) -> int:
        return self.manifest.step

    def source_state(self) -> bytes:
        return (self.directory / SOURCE_FILE).read_bytes()


def find(spec: RunSpec, grid: Grid, identity: Mapping[str, Any]) -> Resumed | None:
    """Choose; called on every rank.

    Args:
        identity: of the run that is to go on.

    Raises:
        ResumeError: there are checkpoints, but none can be used, the spec says not to, or is of fewer steps.
    """
    root = checkpoint_root(spec)
    seen = (directory.complete_steps(root), directory.partial_names(root), directory.unusable_names(root))
    steps, partial, unusable = ranks_agree_on(seen)
    if partial and grid.is_first:
        logger.warning("%s: passed over, as they were never completed: %s", root, ", ".join(partial))
    if unusable and grid.is_first:
        logger.error("%s: passed over, as they are no checkpoints that can be used: %s", root, ", ".join(unusable))
    if steps and spec.checkpoint.resume == "never":
        raise ResumeError(f"{root} holds checkpoints, but checkpoint.resume is never; start anew with --fresh")
    rejected: list[str] = []
    for step in steps:
        manifest, fault = verified(directory.complete_path(root, step), grid)
        if manifest is not None and manifest.step == step:
            found = Resumed(directory.complete_path(root, step), manifest, rejected)
            _check_identity(found, identity)
            _check_steps(found, spec.training.steps)
            return found
        rejected.append(f"step-{step}: {fault or 'its manifest is of another step'}")
        if grid.is_first:
            logger.error("checkpoint of %s is damaged and not used: %s", root, rejected[-1])
    if steps:
        raise ResumeError(
            f"none of the checkpoints in {root} is whole: {'; '.join(rejected)}. Bring one back from a copy, or start "
            "anew with --fresh"
        )
    if unusable:
        raise ResumeError(
            f"{root} holds no checkpoint that can be used, only {', '.join(unusable)}. Bring one back from a copy, or "
            "start anew with --fresh"
        )
    return None


def load(found: Resumed, state: TrainedState, spec: RunSpec, grid: Grid) -> None:
    """Take the trained state from it; called on every rank. Raises ResumeError."""
    same_layout = found.manifest.layout == spec.training.parallel.model_dump()
    warmup, updates = min(found.step, spec.algorithm.value_warmup_steps), spec.training.minibatches_per_step
    state.load(found.directory, found.step * updates, same_layout, warmup * updates)
    if not grid.is_first:
        return
    root = checkpoint_root(spec)
    for each in found.rejected:
        # otherwise it would be found damaged again, and its step be written a second time beside it
        directory.set_aside(root, int(each.partition(":")[0].removeprefix("step-")))
    used = f"; used instead of {', '.join(found.rejected)}" if found.rejected else ""
    random = "" if same_layout else "; written by another layout, so random numbers start from the seed"
    logger.info("going on from %s%s%s", found.directory, used, random)


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
