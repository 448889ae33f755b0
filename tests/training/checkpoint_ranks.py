"""What the checkpoint tests run on ranks: train, save while training goes on, load, train on."""

import logging.handlers
import random
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch

from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec

OPTIMIZER = OptimizerSpec(lr=1e-2, min_lr=1e-3, warmup_steps=2, decay="cosine", weight_decay=0.1)
STEPS = 6


class Trained:
    """A tiny model on this rank's grid, with what a checkpoint holds of it."""

    def __init__(
        self,
        model: Path,
        parallel: ParallelSpec,
        dtype: str = "fp32",
        optimizer: OptimizerSpec = OPTIMIZER,
        grid: Any = None,
    ) -> None:
        from slimerl.training.checkpoint.content import TrainedState

        self.built = tiny.build(model, parallel, dtype, grid)
        self.trainer = tiny.trainer(self.built, AlgorithmSpec(), optimizer, STEPS)
        self.state = TrainedState(self.trainer.chunks, self.trainer._optimizer, self.trainer._schedule)

    def train(self, first: int, last: int) -> list[float]:
        """Steps `first` to `last`; their learning rates."""
        rates = []
        for step in range(first, last + 1):
            minibatches = tiny.micro_batches(tiny.random_step(step), self.built, budget=60)
            rates.append(self.trainer.step(minibatches)["train/lr"])
        return rates

    def snapshot(self) -> dict[str, Any]:
        """Weights, this rank's part of the optimizer's state, the schedule, and what the generators say next."""
        kept = self.state.optimizer.state_dict()
        parts = kept if isinstance(kept, list) else [kept]
        groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
        moments = [value for chained in _inner(self.state.optimizer) for value in chained.state.values()]
        return {
            "weights": tiny.collected(self.built),
            "moments": [{name: tensor.clone() for name, tensor in moment.items()} for moment in moments],
            "updates": [group["step"] for group in groups],
            "schedule": self.state.schedule.state_dict(),
            "draws": _draws(),
        }

    def begin_local_save(self, root: Path, step: int) -> Any:
        from slimerl.training.checkpoint.directory import Manifest
        from slimerl.training.checkpoint.local import rank_root
        from slimerl.training.checkpoint.local_write import LocalWrite

        grid = self.built.grid
        tree = self.state.tree(loading=False, only_own=True) | {"source": b"of the source"}
        return LocalWrite(
            rank_root(root, "run", grid.rank),
            step,
            tree,
            grid.device,
            lambda files: Manifest(step, step, files, {}, {}),
        )

    def begin_save(self, root: Path, step: int) -> Any:
        from slimerl.training.checkpoint.write import Write

        return Write(root, step, self.state.tree(loading=False), self.built.grid.device)


def finish(write: Any, seconds: float = 30) -> None:
    from slimerl.resilience.deadline import Deadline
    from slimerl.training.checkpoint.directory import Manifest

    def manifest(files):
        return Manifest(write.step, write.step, files, {}, {})

    write.finish(Deadline("the checkpoint", seconds), {"more": b"of the source"}, manifest)


def _inner(optimizer: Any) -> list[Any]:
    return [each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer])]


def _draws() -> list[float]:
    """The next numbers of every generator, without drawing them."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])
    return drawn


def save_and_train_on(model: Path, root: Path, parallel: ParallelSpec, dtype: str, after: int) -> tuple[Any, Any, Any]:
    """Two steps, a checkpoint, and `after` more steps while it is written. Returns the states at both times."""
    own = Trained(model, parallel, dtype)
    own.train(1, 2)
    # generators off their seeds, each rank elsewhere
    rank = own.built.grid.rank
    torch.rand(5 + rank), [random.random() for _ in range(3 + rank)], np.random.random(7 + rank)
    saved = own.snapshot()
    write = own.begin_save(root, 2)
    rates = own.train(3, 2 + after)
    finish(write)
    return saved, rates, own.snapshot()


def save_locally_and_train_on(model: Path, root: Path, parallel: ParallelSpec, dtype: str) -> tuple[Any, Any, Any]:
    """As `save_and_train_on`, each rank to a directory of its own, and two more steps."""
    from slimerl.resilience.deadline import Deadline

    own = Trained(model, parallel, dtype)
    own.train(1, 2)
    rank = own.built.grid.rank
    torch.rand(5 + rank), [random.random() for _ in range(3 + rank)], np.random.random(7 + rank)
    saved = own.snapshot()
    write = own.begin_local_save(root, 2)
    rates = own.train(3, 4)
    write.finish(Deadline("the local checkpoint", 30), lambda: None)
    return saved, rates, own.snapshot()


def load_locally_and_train_on(model: Path, root: Path, parallel: ParallelSpec, dtype: str) -> tuple[Any, Any, Any]:
    from slimerl.training.checkpoint import local, local_resume
    from slimerl.training.checkpoint.directory import read_manifest

    own = Trained(model, parallel, dtype)
    grid = own.built.grid
    where = local.rank_root(root, "run", grid.rank) / "step-2"
    found = local_resume.Verified(read_manifest(where))
    assert local_resume.load(where, found, own.state, grid, updates=2, warmup_updates=0) == b"of the source"
    loaded = own.snapshot()
    return loaded, own.train(3, 4), own.snapshot()


def load_and_train_on(
    model: Path, directory: Path, parallel: ParallelSpec, dtype: str, after: int, with_random: bool = True
) -> tuple[Any, Any, Any]:
    own = Trained(model, parallel, dtype)
    own.state.load(directory, updates=2, with_random=with_random)
    loaded = own.snapshot()
    return loaded, own.train(3, 2 + after), own.snapshot()


def errors_of_loads(model: Path, root: Path) -> dict[str, str]:
    """A whole checkpoint, and one that lacks each part, loaded by what wrote them: part → error, empty for none."""
    from slimerl.training.checkpoint.write import Write
    from slimerl.training.optimizer import build_schedule

    own = Trained(model, ParallelSpec())
    own.train(1, 2)
    errors = {}
    for step, part in enumerate(("nothing", "schedule", "optimizer", "moments", "updates", "random", "model")):
        tree = own.state.tree(loading=False)
        _leave_out(part, tree)
        # numbers of steps serve as names of cases
        finish(Write(root, step, tree, own.built.grid.device))
        errors[part] = _error_of_load(own, root / f"step-{step}")
    errors["an update"] = _error_of_load(own, root / "step-0", updates=3)
    faster = OPTIMIZER.model_copy(update={"lr": 2e-2})
    own.state = replace(own.state, schedule=build_schedule(faster, STEPS, own.state.optimizer))
    errors["the learning rate"] = _error_of_load(own, root / "step-0")
    return errors


def _leave_out(part: str, tree: dict[str, Any]) -> None:
    if part == "moments":
        tree["optimizer"].pop("param_state")
    elif part == "updates":
        for group in tree["optimizer"]["optimizer"]["param_groups"]:
            del group["step"]
    elif part != "nothing":
        del tree[part]


def _error_of_load(own: Trained, directory: Path, updates: int = 2) -> str:
    from slimerl.training.checkpoint.content import ResumeError

    try:
        own.state.load(directory, updates, with_random=True)
    except ResumeError as error:
        return str(error)
    return ""


@contextmanager
def limit(which: int, soft: int):
    """A resource of this process and its children runs out at `soft`."""
    import resource

    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def save_with_limit(model: Path, root: Path, parallel: ParallelSpec, which: int, soft: int | None, on_rank: int) -> Any:
    """A good checkpoint of step 2, one of step 3 with a limit on one rank, and a good one of step 4.

    Returns the error of the second, what was there after it, and at the end.
    """
    import os

    from slimerl.training.checkpoint.write import SaveFailed

    own = Trained(model, parallel)
    own.train(1, 2)
    finish(own.begin_save(root, 2))
    own.train(3, 3)
    if soft is None:
        # all below it are taken
        soft = os.dup(0)
        os.close(soft)
    error = ""
    with limit(which, soft) if own.built.grid.rank == on_rank else nullcontext():
        try:
            finish(own.begin_save(root, 3))
        except SaveFailed as failure:
            error = str(failure)
    after_failure = sorted(path.name for path in root.iterdir())
    own.train(4, 4)
    finish(own.begin_save(root, 4))
    return error, after_failure, sorted(path.name for path in root.iterdir())


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


def clipped_norm(model: Path, root: Path, limit: float) -> float:
    """Norm of the gradient that Adam is given after a load under `clip_grad_norm: limit`, from its first moments."""
    own = Trained(model, ParallelSpec())
    own.train(1, 2)
    finish(own.begin_save(root, 2))
    own = Trained(model, ParallelSpec(), "fp32", OPTIMIZER.model_copy(update={"clip_grad_norm": limit}), own.built.grid)
    own.state.load(root / "step-2", updates=2, with_random=True)
    before = own.snapshot()["moments"]
    own.train(3, 3)
    after = own.snapshot()["moments"]
    beta1 = OPTIMIZER.beta1
    gradients = [
        (new["exp_avg"].double() - beta1 * old["exp_avg"].double()) / (1 - beta1)
        for old, new in zip(before, after, strict=True)
    ]
    return float(torch.cat([each.flatten() for each in gradients]).norm())


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
