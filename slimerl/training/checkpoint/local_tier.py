"""The local checkpoints of a trainer that runs: when one is due, its write, what of it is kept.

Flows in: the state at the end of a step. Flows out: parts on the nodes' disks, the note of them in the run directory.
Invariants: at most one is being written; the note names a step once all ranks have their parts of it.
"""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from slimerl.resilience.deadline import Deadline
from slimerl.spec import RunSpec
from slimerl.training.checkpoint import directory, local
from slimerl.training.checkpoint.content import TrainedState
from slimerl.training.checkpoint.directory import Entry, Manifest
from slimerl.training.checkpoint.local import Note, Place
from slimerl.training.checkpoint.local_copies import Copies
from slimerl.training.checkpoint.local_write import FORM, LocalWrite
from slimerl.training.checkpoint.write import agreed, ranks_agree_on
from slimerl.training.parallel import Grid

logger = logging.getLogger(__name__)

SOURCE = "source"
"""In a part: what the source of samples has to know to go on; of the first rank."""


class LocalTier:
    """Of one start of the trainer. Every method is called on every rank."""

    def __init__(
        self, spec: RunSpec, state: TrainedState, grid: Grid, identity: dict[str, Any], last_step: int = 0
    ) -> None:
        """
        Args:
            identity: as it was at the start of the run.
            last_step: of the local checkpoint that the run goes on from; 0: of none.

        Raises:
            SaveFailed: the run directory takes no note, or what is not gone on from cannot be removed.
        """
        assert spec.checkpoint.local_dir is not None
        self._spec, self._state, self._grid, self._identity = spec, state, grid, identity
        self._notes = spec.run_dir / directory.CHECKPOINTS_DIR
        noted = agreed(lambda: _noted(spec, self._notes, last_step) if grid.is_first else None, "note the place of")
        self._note: Note
        self._note, before = ranks_agree_on(noted)
        self._root = local.rank_root(spec.checkpoint.local_dir, self._note.run, grid.rank)
        local.remove_strangers(spec.checkpoint.local_dir, self._note.run, before)
        if last_step:
            # the run is about to do these steps anew
            agreed(partial(local.remove_newer, self._root, last_step), "make room for")
        self._copies = Copies(spec) if spec.checkpoint.local_copies > 1 else None
        self._writing: LocalWrite | None = None

    @property
    def last_step(self) -> int:
        """Of the newest whole one; 0: none."""
        return self._note.step

    @property
    def root(self) -> Path:
        """Of this rank."""
        return self._root

    @property
    def writing(self) -> int | None:
        """The step of the one that is under way."""
        return None if self._writing is None else self._writing.step

    def is_due(self, step: int) -> bool:
        return step % self._spec.checkpoint.local_every_steps == 0

    def begin(self, step: int, source: bytes) -> None:
        """Start to write one; the one before is finished. Raises SaveFailed."""
        assert self._writing is None
        tree = agreed(partial(self._state.tree, loading=False, only_own=True), "collect the state for")
        save = ranks_agree_on(os.urandom(8).hex())
        tree[SOURCE] = source
        manifest = partial(self._manifest, step, save)
        self._writing = LocalWrite(self._root, step, tree, self._grid.device, manifest, self._copies)

    def is_written(self) -> bool:
        """One is under way, and all ranks have written their part."""
        return self._writing is not None and self._writing.done()

    def finish(self) -> dict[str, float]:
        """Wait for the one that is under way; its `checkpoint/…` figures. Raises SaveFailed."""
        write, self._writing = self._writing, None
        if write is None:
            return {}
        deadline = Deadline(f"the local checkpoint of step {write.step}", self._spec.deadlines.checkpoint_s)
        note = msgspec.structs.replace(self._note, step=write.step)
        seconds = write.finish(deadline, partial(local.write_note, self._notes, note))
        self._note = note
        try:
            directory.remove_older(self._root, write.step, local.KEPT)
        except (OSError, directory.Damaged) as error:
            logger.error("older local checkpoints are kept: %s", error)
        return {"checkpoint/local_step": float(write.step), "checkpoint/local_write_s": seconds}

    def give_up(self) -> None:
        """End this rank's writer."""
        if self._writing is not None:
            self._writing.kill()

    def remove(self) -> None:
        """The run is over, and will not ask for them."""
        local.remove_all(self._root)

    def _manifest(self, step: int, save: str, files: dict[str, Entry]) -> Manifest:
        layout = self._spec.training.parallel.model_dump()
        own = {local.RUN: self._note.run, local.SAVE: save, local.FORMAT: FORM}
        return Manifest(step, step, files, layout, self._identity | own)


def _noted(spec: RunSpec, root: Path, last_step: int) -> tuple[Note, str]:
    """The note of this start, of a run that goes on from a local one with the same directory; and that of the start
    before, empty where the run directory is a copy. Raises OSError."""
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    place, before = Place.of(spec.run_dir), local.read_note(root)
    run = before.run if last_step and before is not None else local.new_run(spec.name, place)
    note = Note(run, str(spec.checkpoint.local_dir), place, last_step)
    local.write_note(root, note)
    return note, before.run if before is not None and before.place.is_of(place) else ""
