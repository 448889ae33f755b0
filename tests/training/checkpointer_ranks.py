"""What the tests of whole runs with checkpoints do on ranks: steps as the loop makes them, and where to go on from."""

import errno
import logging.handlers
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from checkpoint_ranks import Trained, limit


def run_with_checkpoints(spec: Any, limited_steps: tuple[int, ...] = ()) -> tuple[list[dict[str, float]], str]:
    """Three steps as the loop makes them; in `limited_steps` rank 1 can write no large file.

    Returns the figures after each step and after the end, and the error that ended it.
    """
    import resource

    from slimerl.training.checkpoint.checkpointer import Checkpointer
    from slimerl.training.checkpoint.identity import identity
    from slimerl.training.checkpoint.write import SaveFailed

    own = Trained(spec.model.path, spec.training.parallel)
    rank, step = own.built.grid.rank, 0
    checkpoints = Checkpointer(spec, own.state, own.built.grid, lambda: f"source at {step}".encode(), identity(spec))
    figures = []
    try:
        for step in range(1, 4):
            own.train(step, step)
            checkpoints.trained(step)
            limited = limit(resource.RLIMIT_FSIZE, 20_000) if rank == 1 and step in limited_steps else nullcontext()
            with limited:
                checkpoints.after_step(step)
            figures.append(checkpoints.take_figures())
        checkpoints.close()
    except SaveFailed as failure:
        return figures, str(failure)
    return [*figures, checkpoints.take_figures()], ""


def run_with_local_fault(spec: Any, stage: str, on_rank: int) -> tuple[list[dict[str, float]], str]:
    """As `run_with_checkpoints`; on one rank the save of step 2 raises RuntimeError in that function."""
    from unittest import mock

    import torch.distributed as dist

    from slimerl.training.checkpoint import directory, local, local_tier, local_write

    owner = {"part_of": local_write, "write_note": local}.get(stage, directory)
    real, begin, first = getattr(owner, stage), local_tier.LocalTier.begin, [True]

    def raising(*args: Any) -> Any:
        if not first[0] and dist.get_rank() == on_rank:
            raise RuntimeError(f"injected into {stage}")
        return real(*args)

    def from_second_on(self: Any, step: int, source: bytes) -> None:
        first[0] = step < 2
        begin(self, step, source)

    with mock.patch.object(owner, stage, raising), mock.patch.object(local_tier.LocalTier, "begin", from_second_on):
        return run_with_checkpoints(spec)


def run_to_its_end(spec: Any) -> None:
    from slimerl.training.checkpoint.checkpointer import Checkpointer
    from slimerl.training.checkpoint.identity import identity

    own = Trained(spec.model.path, spec.training.parallel)
    checkpoints = Checkpointer(spec, own.state, own.built.grid, lambda: b"", identity(spec))
    own.train(1, 1)
    checkpoints.trained(1)
    checkpoints.after_step(1)
    checkpoints.close()
    if spec.checkpoint.local_dir is not None:
        assert any(spec.checkpoint.local_dir.rglob(f"rank-{own.built.grid.rank}.pt"))
    checkpoints.remove_local()


def run_while_the_data_changes(spec: Any) -> None:
    """As `run_with_checkpoints`; the data is another one once the run has begun."""
    from unittest import mock

    from slimerl.training.checkpoint import checkpointer

    real = checkpointer.Checkpointer.trained

    def trained(self: Any, step: int) -> None:
        if self.grid.is_first:
            spec.data.train_path.write_text(f"other rows at step {step}")
        real(self, step)

    with mock.patch.object(checkpointer.Checkpointer, "trained", trained):
        run_with_checkpoints(spec)


def run_with_faults(spec: Any, faults: list[tuple[str, int]]) -> tuple[list[str], dict[str, float]]:
    """One checkpoint per fault, which raises RuntimeError on one rank, and one without a fault after them.

    Args:
        faults: the function that raises, and on which rank.

    Returns:
        What was said of each (on the first rank), and the figures at the end.
    """
    from unittest import mock

    from slimerl.training.checkpoint import checkpointer
    from slimerl.training.checkpoint.identity import identity

    own = Trained(spec.model.path, spec.training.parallel)
    own.train(1, 1)
    rank, said = own.built.grid.rank, logging.handlers.BufferingHandler(1000)
    checkpoints = checkpointer.Checkpointer(spec, own.state, own.built.grid, lambda: b"", identity(spec))
    owners = _owners_of_faults(own, checkpoints)
    checkpointer.logger.addHandler(said)
    try:
        for step, (name, on_rank) in enumerate(faults, start=1):
            injected = mock.patch.object(owners[name], name, _raising(owners[name], name))
            with injected if rank == on_rank else nullcontext():
                checkpoints.trained(step)
                checkpoints.after_step(step)
                checkpoints.close()
        checkpoints.trained(len(faults) + 1)
        checkpoints.after_step(len(faults) + 1)
        checkpoints.close()
    finally:
        checkpointer.logger.removeHandler(said)
    return [record.getMessage() for record in said.buffer if record.levelname == "ERROR"], checkpoints.take_figures()


def _raising(owner: Any, name: str) -> Any:
    real = getattr(owner, name)

    def raising(*args: Any, **kwargs: Any) -> None:
        if name == "sharded_state_dict":
            # after what it gathers: nobody can leave in the middle of that alone
            real(*args, **kwargs)
        raise RuntimeError(f"injected into {name}")

    return raising


def _owners_of_faults(own: Trained, checkpoints: Any) -> dict[str, Any]:
    """Where memory, disk or a bug may stop a rank, in the order in which a checkpoint comes there."""
    from megatron.core.dist_checkpointing import state_dict_utils, validation
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from slimerl.training.checkpoint import plan

    return {
        "source_state": checkpoints,
        "sharded_state_dict": own.state.optimizer,
        "extract_nonpersistent": state_dict_utils,
        "_validate_sharding_for_key": validation,
        "mcore_to_pyt_state_dict": plan,
        "prepare_local_plan": FileSystemWriterAsync,
        "prepare_write_data": FileSystemWriterAsync,
        "preload_tensors": FileSystemWriterAsync,
        "write_preloaded_data": FileSystemWriterAsync,
        "finish": FileSystemWriterAsync,
    }


def with_a_broken_disk(disk: Path, job: Callable[..., Any], *args: Any) -> Any:
    """One of these functions; rank 1 has an I/O error at every look at its disk."""
    from unittest import mock

    import torch.distributed as dist

    from slimerl.training.checkpoint import directory

    def failing(name: str) -> Any:
        real = getattr(directory, name)

        def look(root: Any, *args: Any) -> Any:
            if dist.get_rank() == 1 and root.is_relative_to(disk):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(root, *args)

        return mock.patch.object(directory, name, look)

    with failing("complete_steps"), failing("start_partial"):
        return job(*args)


def find_load_and_listen(specs: list[Any]) -> tuple[list[Any], list[str]]:
    """As `find_and_load`, and what was logged meanwhile."""
    from slimerl.training.checkpoint import resume

    heard = logging.handlers.BufferingHandler(1000)
    resume.logger.addHandler(heard)
    try:
        answers = find_and_load(specs)
    finally:
        resume.logger.removeHandler(heard)
    return answers, [record.getMessage() for record in heard.buffer]


def find_and_load(specs: list[Any]) -> list[Any]:
    """For each spec the step, the source's state and what was rejected, or the error."""
    from slimerl.training.checkpoint import resume
    from slimerl.training.checkpoint.content import ResumeError
    from slimerl.training.checkpoint.identity import identity

    own = Trained(specs[0].model.path, specs[0].training.parallel)
    answers: list[Any] = []
    for spec in specs:
        try:
            found = resume.find(spec, own.built.grid, identity(spec))
            source = None if found is None else resume.load(found, own.state, spec, own.built.grid)
            answers.append(found and (found.step, source, list(found.rejected)))
        except ResumeError as error:
            answers.append(str(error))
    return answers
