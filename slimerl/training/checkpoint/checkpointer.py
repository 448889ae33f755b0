"""Checkpoints as the training loop uses them: when one is due, how the writes go, what became of them.

Flows in: the ends of steps. Flows out: `RUN_DIR/checkpoints/step-N`, local ones between them where the spec wants them
(`local_tier.py`), `checkpoint/…` figures, a log line for each.
Invariants: at most one is being written; one that fails is named and counted, and costs no older one.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slimerl.resilience.deadline import Deadline
from slimerl.spec import RunSpec
from slimerl.training.checkpoint import directory, local
from slimerl.training.checkpoint.content import TrainedState
from slimerl.training.checkpoint.directory import Entry, Manifest
from slimerl.training.checkpoint.local_tier import LocalTier
from slimerl.training.checkpoint.write import SaveFailed, Write, agreed, ranks_agree_on
from slimerl.training.parallel import Grid

logger = logging.getLogger(__name__)

SOURCE_FILE = "source.msgpack"
"""What the source of samples has to know to go on."""


def checkpoint_root(spec: RunSpec) -> Path:
    return spec.run_dir / directory.CHECKPOINTS_DIR


@dataclass
class Checkpointer:
    """Every method is called on every rank. `source_state`: bytes on the first rank; `identity`: as it was at the
    start of the run."""

    spec: RunSpec
    state: TrainedState
    grid: Grid
    source_state: Callable[[], bytes]
    identity: dict[str, Any]
    last_step: int = 0
    """Of the newest complete one; 0: none."""
    last_local_step: InitVar[int] = 0
    """Of the local one that the run goes on from; 0: it does not."""
    stopping: bool = False
    """The run was asked to stop: the checkpoint of this step is the last thing that it does."""
    _near: LocalTier | None = None
    """None: the run keeps no local ones."""
    _writing: Write | None = None
    _source: bytes | None = None
    """At the end of the last step that was due; None where it could not be had."""
    _source_of_writing: bytes = b""
    _figures: dict[str, float] = field(default_factory=dict)
    _failed: int = 0
    _failed_near: int = 0
    _last_failure: str = ""

    def __post_init__(self, last_local_step: int) -> None:
        """Raises SaveFailed."""
        if self.spec.checkpoint.local_dir is not None:
            self._near = LocalTier(self.spec, self.state, self.grid, self.identity, last_local_step)
        else:
            agreed(lambda: local.forget(self._root) if self.grid.is_first else None, "forget the local part of")

    def trained(self, step: int) -> None:
        """The weights are those of `step`, and no sample of the next step is under way: note where the source is.

        Raises:
            SaveFailed: as `after_step`.
        """
        self._finish_if_done()
        self.stopping = self._may_end_run(step) and self._asked_to_stop()
        if not self._due(step) and not self._due_near(step):
            return
        self._source = None
        try:
            self._source = agreed(self.source_state, "get the source of samples for")
        except SaveFailed as failure:
            self._fail(step, failure)

    def after_step(self, step: int) -> None:
        """Start a checkpoint if one is due; complete the one before once it is written.

        Raises:
            SaveFailed: one could not be written, and by checkpoint.on_failure that ends the run.
        """
        self._finish_if_done()
        if self._due_near(step) and self._source is not None:
            self._write_near(step, self._source)
        if not self._due(step) or self._source is None:
            return
        if self._writing is not None:
            self._finish()
        try:
            tree = agreed(partial(self.state.tree, loading=False), "collect the state for")
            self._writing = Write(self._root, step, tree, self.grid.device)
            self._source_of_writing = self._source
        except SaveFailed as failure:
            self._fail(step, failure)

    def close(self) -> None:
        """Wait for the write that is under way; a request to stop is answered by then. Raises SaveFailed."""
        if self._writing is not None:
            self._finish()
        self._finish_near()
        if self.grid.is_first:
            self._stop_file.unlink(missing_ok=True)

    def give_up(self) -> None:
        """End this rank's writers: whoever goes on in this process may write the same checkpoints."""
        if self._writing is not None:
            self._writing.kill()
        if self._near is not None:
            self._near.give_up()

    def require(self, step: int) -> None:
        """After `close`, of a run that ends before its last step. Raises SaveFailed: `step` has no checkpoint."""
        if self.last_step != step:
            raise SaveFailed(
                f"the run was asked to stop, but what it has done since the newest checkpoint is lost: "
                f"{self._last_failure}; mend the cause and start the run again, it goes on from that checkpoint"
            )

    def remove_local(self) -> None:
        """The run is over, and will not ask for them."""
        if self._near is not None:
            self._near.remove()

    def take_figures(self) -> dict[str, float]:
        """`checkpoint/…` since the last call."""
        figures, self._figures = self._figures, {}
        return figures

    @property
    def _root(self) -> Path:
        return checkpoint_root(self.spec)

    @property
    def _stop_file(self) -> Path:
        return self.spec.run_dir / directory.STOP_FILE

    def _may_end_run(self, step: int) -> bool:
        """Between two refreshes the reference model is that of an earlier step, which no checkpoint has."""
        refresh = self.spec.algorithm.reference_refresh_steps
        return not refresh or step % refresh == 0

    def _asked_to_stop(self) -> bool:
        """Decided by one rank: a file may appear while the others look."""
        if not self.spec.checkpoint.every_steps:
            return False
        return bool(ranks_agree_on(self._stop_file.exists() if self.grid.is_first else None))

    def _due(self, step: int) -> bool:
        every = self.spec.checkpoint.every_steps
        return every > 0 and (step % every == 0 or self.stopping)

    def _due_near(self, step: int) -> bool:
        """Of a run that ends here the other one is what counts."""
        return self._near is not None and self._near.is_due(step) and not self.stopping

    def _write_near(self, step: int, source: bytes) -> None:
        self._finish_near()
        assert self._near is not None
        try:
            self._near.begin(step, source)
        except SaveFailed as failure:
            self._fail_near(self._near, step, failure)

    def _finish_near(self) -> None:
        if self._near is None or self._near.writing is None:
            return
        step = self._near.writing
        try:
            self._figures |= self._near.finish()
        except SaveFailed as failure:
            self._fail_near(self._near, step, failure)

    def _finish_if_done(self) -> None:
        if self._near is not None and self._near.is_written():
            self._finish_near()
        if self._writing is not None and self._writing.done():
            self._finish()

    def _finish(self) -> None:
        write, self._writing = self._writing, None
        assert write is not None
        deadline = Deadline(f"the checkpoint of step {write.step} to be written", self.spec.deadlines.checkpoint_s)
        extra = {SOURCE_FILE: self._source_of_writing}
        try:
            seconds = write.finish(deadline, extra, partial(self._manifest, write.step))
        except SaveFailed as failure:
            self._fail(write.step, failure)
            return
        self.last_step = write.step
        self._figures |= {"checkpoint/step": float(write.step), "checkpoint/write_s": seconds}
        if self.grid.is_first:
            logger.info("checkpoint of step %d complete after %.1f s", write.step, seconds)
            self._remove_older(write.step)

    def _manifest(self, step: int, files: dict[str, Entry]) -> Manifest:
        layout = self.spec.training.parallel.model_dump()
        return Manifest(step, step, files, layout, self.identity)

    def _fail(self, step: int, failure: SaveFailed) -> None:
        self._failed += 1
        self._figures["checkpoint/failed"] = float(self._failed)
        left = f"step {self.last_step} is the newest" if self.last_step else "there is none yet"
        message = f"the checkpoint of step {step} failed ({self._failed} so far; {left}): {failure}"
        self._last_failure = message = f"{message}{_room(self._root)}"
        self._tell(message, failure)

    def _fail_near(self, near: LocalTier, step: int, failure: SaveFailed) -> None:
        self._failed_near += 1
        self._figures["checkpoint/local_failed"] = float(self._failed_near)
        left = f"step {near.last_step} is the newest" if near.last_step else "there is none yet"
        message = f"the local checkpoint of step {step} failed ({self._failed_near} so far; {left}): {failure}"
        self._tell(f"{message}{_room(near.root)}", failure)

    def _tell(self, message: str, failure: SaveFailed) -> None:
        if self.spec.checkpoint.on_failure == "stop":
            raise SaveFailed(f"{message}; the run stops by checkpoint.on_failure") from failure
        if self.grid.is_first:
            logger.error("%s", message)

    def _remove_older(self, newest: int) -> None:
        try:
            directory.remove_older(self._root, newest, self.spec.checkpoint.keep_last)
        except (OSError, directory.Damaged) as error:
            logger.error("older checkpoints are kept: %s", error)


def _room(directory: Path) -> str:
    """Behind an error's message."""
    if not directory.exists():
        return ""
    return f" ({shutil.disk_usage(directory).free / 2**20:,.0f} MiB are free on its disk now)"
