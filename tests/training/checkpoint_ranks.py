"""What the checkpoint tests run on ranks: train, save while training goes on, load, train on."""

import random
import time
from contextlib import contextmanager, nullcontext, suppress
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
        return begin_local_save(self.state, root, step, self.built.grid)

    def begin_save(self, root: Path, step: int) -> Any:
        from slimerl.training.checkpoint.write import Write

        return Write(root, step, self.state.tree(loading=False), self.built.grid.device)


def begin_local_save(state: Any, root: Path, step: int, grid: Any) -> Any:
    from slimerl.training.checkpoint.directory import Manifest
    from slimerl.training.checkpoint.local import rank_root
    from slimerl.training.checkpoint.local_write import LocalWrite

    tree = state.tree(loading=False, only_own=True) | {"source": b"of the source"}
    own = rank_root(root, "run", grid.rank)
    return LocalWrite(own, step, tree, grid.device, lambda files: Manifest(step, step, files, {}, {}))


def save_locally(state: Any, root: Path, step: int, grid: Any) -> None:
    from slimerl.resilience.deadline import Deadline

    begin_local_save(state, root, step, grid).finish(Deadline("the local checkpoint", 30), lambda: None)


def load_locally(state: Any, root: Path, step: int, grid: Any, warmup_updates: int = 0) -> None:
    from slimerl.training.checkpoint import local, local_resume
    from slimerl.training.checkpoint.directory import read_manifest

    where = local.rank_root(root, "run", grid.rank) / f"step-{step}"
    found = local_resume.Verified(read_manifest(where))
    assert local_resume.load(where, found, state, grid, step, warmup_updates) == b"of the source"


def save(state: Any, root: Path, step: int, grid: Any) -> None:
    from slimerl.training.checkpoint.write import Write

    finish(Write(root, step, state.tree(loading=False), grid.device))


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
    own = Trained(model, parallel, dtype)
    load_locally(own.state, root, 2, own.built.grid)
    loaded = own.snapshot()
    return loaded, own.train(3, 4), own.snapshot()


def writers_left(model: Path, root: Path) -> dict[str, int]:
    """Processes that still write once a collective of this rank has failed, just as they have begun or while it waits
    for them, of a checkpoint of either kind."""
    from unittest import mock

    import psutil

    from slimerl.resilience.deadline import Deadline
    from slimerl.training.checkpoint import directory, local_write, write

    own = Trained(model, ParallelSpec())
    own.train(1, 2)
    agreed = write.agreed

    def broken(act: Any, what: str) -> Any:
        answer = agreed(act, what)
        if what == "start the writer of":
            raise RuntimeError("gloo: closed")
        return answer

    def local(step: int) -> None:
        own.begin_local_save(root, step).finish(Deadline("the local checkpoint", 30), lambda: None)

    def shared(step: int) -> None:
        finish(own.begin_save(root, step))

    waiting = {"wait_until_ended": mock.Mock(side_effect=RuntimeError("gloo: closed"))}
    endless = mock.patch.object(directory, "entry_of", mock.Mock(side_effect=lambda _: time.sleep(100)))
    left = {}
    for save, module in ((local, local_write), (shared, write)):
        for name, faults in (("begun", {"agreed": broken}), ("waiting", waiting)):
            with mock.patch.multiple(module, **faults), endless, suppress(RuntimeError):
                save(len(left))
            left[f"{save.__name__}, {name}"] = len(psutil.Process().children())
    return left


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
