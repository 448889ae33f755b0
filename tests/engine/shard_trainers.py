"""A trainer of several ranks in one process, a thread each: the real members of a `shards` sync, with parameters that
placements fill in place of Megatron's; and faults that strike while parcels are packed."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from engine_fixtures import RunningEngine

from slimerl.resharding.assemble import scatter
from slimerl.resharding.families import family_of
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology
from slimerl.resharding.shard_sync import ShardSyncer
from slimerl.resharding.shard_trainer import ShardModel
from slimerl.resharding.sync_plan import plan_sync
from slimerl.resharding.tensors import Placement
from slimerl.samples.messages import EngineInfo, HoldReply, HoldRequest, ReleaseRequest, Status

TIMEOUT_S = 60.0


@dataclass
class Desk:
    """The rollout role's side of a sync."""

    engines: list[EngineInfo]
    released: list[ReleaseRequest] = field(default_factory=list)

    def status(self) -> Status:
        return Status(0, 0, 0, 0, 0, {}, self.engines)

    def hold(self, request: HoldRequest) -> HoldReply:
        return HoldReply("lease", list(self.engines))

    def release(self, request: ReleaseRequest) -> None:
        self.released.append(request)


class Weights(dict[str, torch.Tensor]):
    """A rank's parameters. `strike` is called once, when the `after`-th of them is read while parcels are packed."""

    after = 0
    strike: Callable[[], None] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self.strike is not None:
            self.after -= 1
            if self.after <= 0:
                strike, self.strike = self.strike, None
                strike()
        return super().__getitem__(name)


class Trainers:
    """`sync(version, model)` as all ranks do it; use as a context manager."""

    def __init__(
        self,
        engines: Sequence[RunningEngine],
        staged: bool = True,
        layout: MegatronLayout = MegatronLayout(tensor=2),  # noqa: B008 (a value)
        sync_s: float = TIMEOUT_S,
        gpus_per_node: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config: Mapping[str, Any] = json.loads((engines[0].model_path / "config.json").read_text())
        self._family, self._config, self._layout = family_of(config), config, layout
        engine = EngineLayout(engines[0].info.tensor_parallel)
        plan = plan_sync(config, self._family, layout, layout.holders, engine, dtype, 1 << 20)
        ranks = range(layout.world_size)
        self.placements: list[list[Placement]] = [self._family.megatron_placements(config, layout, r) for r in ranks]

        def shape_of(count: int) -> SyncShape:
            topology = Topology(layout.world_size, engine.world_size, count, gpus_per_node)
            return SyncShape(config, layout, engine, topology, dtype)

        self.desk = Desk([one.info for one in engines])
        self.weights = [Weights() for _ in ranks]
        for weights, placements in zip(self.weights, self.placements, strict=True):
            for placement in placements:
                held = weights.get(placement.parameter)
                shape = placement.at.stops if held is None else tuple(map(max, held.shape, placement.at.stops))
                weights[placement.parameter] = torch.zeros(shape)
        self._barrier = threading.Barrier(layout.world_size)
        self._told: dict[int, Any] = {}
        model = ShardModel(plan, self.placements, shape_of)
        self.syncers = [
            ShardSyncer(
                model,
                rank,
                lambda rank=rank: self.weights[rank],
                self.desk if rank == 0 else None,  # type: ignore[arg-type]
                lambda value, rank=rank: self._exchange(rank, value),
                sync_s,
                staged,
            )
            for rank in ranks
        ]

    def __enter__(self) -> "Trainers":
        return self

    def __exit__(self, *_error: object) -> None:
        for syncer in reversed(self.syncers):
            syncer.close()

    def _exchange(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = value
        self._barrier.wait(TIMEOUT_S)
        found = [self._told[rank] for rank in range(len(self.syncers))]
        self._barrier.wait(TIMEOUT_S)
        return found

    def fill(self, model: Any) -> None:
        """`model`: a transformers model."""
        logical = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        for weights, placements in zip(self.weights, self.placements, strict=True):
            scatter(placements, logical, dict(weights))

    def strike(self, rank: int, after: int, what: Callable[[], None]) -> None:
        """While rank `rank` packs, at the `after`-th parameter."""
        self.weights[rank].after, self.weights[rank].strike = after, what

    def sync(self, version: int, model: Any = None) -> dict[str, float]:
        """Rank 0's phases. Raises what rank 0 raised."""
        if model is not None:
            self.fill(model)
        results: list[Any] = [None] * len(self.syncers)

        def run(rank: int) -> None:
            try:
                results[rank] = self.syncers[rank].sync(version)
            except BaseException as error:  # noqa: BLE001 (raised again below)
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(self.syncers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * TIMEOUT_S)
        self.results = results
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]


@contextmanager
def flipped_bit(monkeypatch: Any, times: int) -> Iterator[list[int]]:
    """Fault: so many parcels that this process sends lose a bit behind the checksum; yields their sizes."""
    from slimerl.engine.inside import links

    hit: list[int] = []
    intact = links._GroupLink.send

    def send(self: Any, flat: torch.Tensor) -> Any:
        if len(hit) < times:
            hit.append(flat.numel())
            flat = flat.clone()
            flat[flat.numel() // 2] ^= 1
        return intact(self, flat)

    with monkeypatch.context() as patched:
        patched.setattr(links._GroupLink, "send", send)
        yield hit
