"""The trainer's ranks stay in step over a sync, also where the coordinator fails."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from resharding_models import megatron_reference, random_state

from slimerl.resharding.families import family_of
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.shard_sync import ShardSyncer
from slimerl.resharding.shard_trainer import ShardModel
from slimerl.resharding.sync import WeightSyncer
from slimerl.resharding.sync_plan import plan_sync
from slimerl.samples.messages import HoldReply, HoldRequest, ReleaseRequest, Status

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


class Refusing:
    """A rollout role that grants no hold."""

    def status(self) -> Status:
        raise AssertionError("no engine has a receiver")

    def hold(self, request: HoldRequest) -> HoldReply:
        raise RuntimeError(f"no engine for version {request.version}")

    def release(self, request: ReleaseRequest) -> None:
        raise AssertionError("nothing was held")


def sync_and_go_on(directory: Path) -> tuple[str, float]:
    """What the sync said on this rank, and the sum of a collective after it."""
    layout, rank = MegatronLayout(tensor=2), dist.get_rank()
    plan = plan_sync(CONFIG, family_of(CONFIG), layout, [0, 1], EngineLayout(), torch.float32, 1024)
    parameters = megatron_reference(CONFIG, random_state(CONFIG), layout, rank)
    control = Refusing() if rank == 0 else None
    syncer = WeightSyncer(plan, dist.group.WORLD, lambda: parameters, control, 10.0, "ipc", directory)
    said = ""
    try:
        syncer.sync(3)
    except RuntimeError as error:
        said = str(error)
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return said, float(value)


def test_w5_a_coordinator_that_fails_leaves_no_rank_behind_in_a_collective(ranks: RankPool, tmp_path: Path):
    """Fault: the hold is refused while the other ranks have begun to gather."""
    assert ranks.run(2, sync_and_go_on, tmp_path) == [("no engine for version 3", 3.0), ("", 3.0)]


def test_w5_a_coordinator_that_fails_at_the_first_sync_tells_the_ranks_that_wait_for_its_address() -> None:
    """Fault: the hold is refused before the ranks of a `shards` sync have a mailbox; twice, for they stay in step."""
    told: list[Any] = [None, None]
    together = threading.Barrier(2)

    def exchange(rank: int, value: Any) -> list[Any]:
        told[rank] = value
        together.wait(10)
        found = list(told)
        together.wait(10)
        return found

    def sync(rank: int) -> list[str]:
        plan = plan_sync(CONFIG, family_of(CONFIG), MegatronLayout(), [0], EngineLayout(), torch.float32, 1024)
        model = ShardModel(plan, plan.trainer_ranks, lambda _engines: pytest.fail("nothing is to be planned"))
        control = Refusing() if rank == 0 else None
        parameters = {"weight": torch.zeros(1)}
        syncer = ShardSyncer(model, rank, lambda: parameters, control, lambda value: exchange(rank, value), 10.0, True)
        said = []
        for version in (3, 4):
            with pytest.raises(RuntimeError) as error:
                syncer.sync(version)
            said.append(f"{error.type.__name__}: {error.value}")
        return said

    with ThreadPoolExecutor(2) as threads:
        of_first, of_other = threads.map(sync, range(2))
    assert of_first == ["RuntimeError: no engine for version 3", "RuntimeError: no engine for version 4"]
    assert of_other == [
        f"SyncEnded: the update to version {version} was not finished: no engine for version {version}"
        for version in (3, 4)
    ]
