"""What a checkpoint holds of the trainer, in Megatron's distributed format: model, optimizer, schedule, random numbers.

Flows in: the live objects of this rank. Flows out: the tree of sharded tensors to write; and back.
Invariants: the format knows the whole tensors and not the ranks, so that any layout reads what another wrote; after a
load everything has come from the checkpoint: what is missing there is an error that names it, never a fresh start.
"""

import pickle
import random
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from slimerl.training.model import unwrapped

_RANDOM = "random"
_OPTIMIZER = "optimizer"
_SCHEDULE = "schedule"
_CRITIC = "critic"
_NAMED = 5
"""Keys that a message lists at most."""


class ResumeError(Exception):
    """The run cannot go on from its checkpoints; the message says why and what to do."""


@dataclass(frozen=True)
class TrainedState:
    """What changes while training. `schedule`: an OptimizerParamScheduler; `critic`: that of a critic."""

    chunks: Sequence[torch.nn.Module]
    optimizer: Any
    schedule: Any
    critic: "TrainedState | None" = None

    @property
    def all(self) -> list["TrainedState"]:
        """Of the policy, and of the critic where there is one."""
        return [self] if self.critic is None else [self, self.critic]

    def tree(self, loading: bool, with_random: bool = True, only_own: bool = False) -> dict[str, Any]:
        """Megatron's sharded state; called on every rank.

        Args: `only_own`: as this rank has the optimizer's state, which only the same layout reads; otherwise it is
        gathered.
        """
        tree = self._part(loading, "", only_own)
        if self.critic is not None:
            tree[_CRITIC] = self.critic._part(loading, f"{_CRITIC}.", only_own)
        if with_random:
            ranks = dist.get_world_size()
            tree[_RANDOM] = ShardedObject(_RANDOM, None if loading else _random_state(), (ranks,), (dist.get_rank(),))
        return tree

    def _part(self, loading: bool, prefix: str, only_own: bool) -> dict[str, Any]:
        """Of one model. `prefix`: what tells its tensors from those of the other."""
        metadata = sharding_metadata(only_own)
        tree: dict[str, Any] = {
            name: unwrapped(chunk).sharded_state_dict(prefix=prefix, metadata=metadata)  # type: ignore[operator]
            for name, chunk in zip(model_names(self.chunks), self.chunks, strict=True)
        }
        tree[_OPTIMIZER] = self.optimizer.sharded_state_dict(tree, metadata=metadata, is_loading=loading)
        if only_own:
            # these are named by their place in this rank's buffers, and so alike in both models
            add_prefix_for_sharding(tree[_OPTIMIZER], prefix)
        if not loading:
            tree[_SCHEDULE] = self.schedule.state_dict()
        return tree

    def load(self, directory: Path, updates: int, with_random: bool, warmup_updates: int = 0) -> None:
        """Take everything from a checkpoint; called on every rank.

        Args:
            updates: optimizer updates that the checkpoint must have seen.
            warmup_updates: of these, how many the critic alone has seen.
            with_random: also the random numbers' state; only where this layout wrote it.

        Raises:
            ResumeError: names what the checkpoint lacks, or what of the schedule was changed in the spec.
        """
        tree = self.tree(loading=True, with_random=with_random)
        _check_parts(directory, tree)
        with warnings.catch_warnings():
            # Megatron uses what torch means to remove
            warnings.simplefilter("ignore", FutureWarning)
            loaded = dist_checkpointing.load(tree, str(directory))
        self.take(directory, loaded, updates, with_random, warmup_updates)

    def take(
        self, directory: Path, loaded: dict[str, Any], updates: int, with_random: bool, warmup_updates: int = 0
    ) -> None:
        """Take everything from a tree that was read from `directory`; otherwise as `load`."""
        self._take(directory, loaded, updates - warmup_updates, prefix="")
        if self.critic is not None:
            self.critic._take(directory, loaded[_CRITIC], updates, prefix=f"{_CRITIC}.")
        if with_random:
            _set_random_state(loaded[_RANDOM])

    def _take(self, directory: Path, loaded: dict[str, Any], updates: int, prefix: str) -> None:
        for name, chunk in zip(model_names(self.chunks), self.chunks, strict=True):
            own = {key.removeprefix(prefix): tensor for key, tensor in loaded[name].items()}
            unwrapped(chunk).load_state_dict(own)
        _check_updates(directory, loaded[_OPTIMIZER], updates)
        with torch.no_grad():
            # Megatron's own has it for one kind of sharding and not for the other
            self.optimizer.load_state_dict(loaded[_OPTIMIZER])
        _load_schedule(self.schedule, loaded[_SCHEDULE])


def sharding_metadata(only_own: bool = False) -> dict[str, Any]:
    """How Megatron is to name and cut what it saves. Args: `only_own`: as of `TrainedState.tree`."""
    return {
        # the one kind that every other layout can read, and the one that neither copies nor gathers
        "distrib_optim_sharding_type": "dp_reshardable" if only_own else "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def model_names(chunks: Sequence[torch.nn.Module]) -> list[str]:
    """The tree's keys of the model's chunks."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _check_parts(directory: Path, tree: dict[str, Any]) -> None:
    """The checkpoint holds what all ranks together ask for, and nothing else of the model. Raises ResumeError."""
    asked = {each.key for each in nested_values(load_preprocess(tree)[0]) if isinstance(each, ShardedBase)}
    of_ranks: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, asked)
    wanted = set().union(*of_ranks)
    # random numbers of another layout are left where they are
    there = {each.key for each in load_sharded_metadata(str(directory)).values()}
    if _RANDOM not in wanted:
        there -= {_RANDOM}
    there |= dist_checkpointing.load_common_state_dict(str(directory)).keys()
    common = {_OPTIMIZER, _SCHEDULE} | ({_CRITIC} & tree.keys())
    if lacking := (wanted | common) - there:
        raise ResumeError(
            f"{directory} lacks {_some(lacking)}; what starts afresh unnoticed spoils the run. "
            "Use another checkpoint, or start anew with --fresh"
        )
    if unread := there - wanted - common:
        raise ResumeError(f"{directory} holds {_some(unread)}, which this model has no place for")


def _check_updates(directory: Path, optimizer: Any, updates: int) -> None:
    """Adam's bias correction depends on the number of updates, which stands in the parameter groups."""
    counted = sorted({group.get("step") for group in _parameter_groups(optimizer)}, key=str)
    if counted != [updates] and (updates or counted != [None]):
        raise ResumeError(f"{directory}: the optimizer has counted {counted} updates, but {updates} were made")


def _parameter_groups(tree: Any) -> Iterable[dict[str, Any]]:
    """Of one optimizer, or of each that is chained."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "param_groups":
                yield from value
            else:
                yield from _parameter_groups(value)


def _load_schedule(schedule: Any, saved: dict[str, Any]) -> None:
    own = schedule.state_dict()
    # where nothing decays, a run may become longer
    free = {"num_steps"} | ({"lr_decay_steps", "wd_incr_steps"} if own["lr_decay_style"] == "constant" else set())
    if saved.keys() != own.keys():
        raise ResumeError(f"the schedule of the checkpoint holds {_some(saved)}, not {_some(own)}")
    changed = [
        f"{name} was {saved[name]}, is {own[name]}" for name in own if name not in free and saved[name] != own[name]
    ]
    if changed:
        raise ResumeError(
            f"training.optimizer (or training.steps) is not as it was when the checkpoint was written: "
            f"{'; '.join(changed)}. Set it back, or start anew with --fresh"
        )
    schedule.load_state_dict({**own, "num_steps": saved["num_steps"]})


def _random_state() -> torch.Tensor:
    """Every generator of this process, as bytes."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def _set_random_state(data: torch.Tensor) -> None:
    state = pickle.loads(data.numpy().tobytes())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def _some(names: Iterable[str]) -> str:
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more
