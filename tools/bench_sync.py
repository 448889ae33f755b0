"""Measures weight syncs into a real engine on this machine, over each transport: where the seconds go (goal P7).

    python tools/bench_sync.py MODEL [--transports shards,broadcast] [--trainers 2] [--syncs 3]

MODEL is a checkpoint directory (`tools/fetch_smollm2.py` gets one). The trainer's ranks are threads of this process
with the checkpoint's weights in Megatron's layout; one SGLang server takes the syncs. Of each transport the last sync
counts: the first one opens what is kept. `stall` is how long the engine stood still, from before its pause until it
generates again; for `shards` it is set against copy + digest, which no sync can do without, and tokens are generated
while weights travel. Between syncs a hundredth of the elements moves to a neighbouring number; for `delta` that is all
there is to send. Times are wall clock: other work on the machine counts.
"""

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import numpy as np
import torch
import typer
from bench_delta import neighbours
from rich.console import Console
from rich.table import Table

from slimerl.engine.client import EngineClient
from slimerl.engine.launcher import Server, detect_device, start_server
from slimerl.engine.protocol import PauseMode, SamplingParams
from slimerl.resharding.assemble import scatter
from slimerl.resharding.families import family_of
from slimerl.resharding.hf_checkpoint import HfCheckpoint
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology
from slimerl.resharding.shard_sync import ShardSyncer
from slimerl.resharding.shard_trainer import ShardModel
from slimerl.resharding.sync import WeightSyncer
from slimerl.resharding.sync_plan import plan_sync
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import EngineInfo, HoldReply, HoldRequest, ReleaseRequest, Status
from slimerl.spec.load import spec_from_tree
from slimerl.training.model_config import read_config

TIMEOUT_S = 300.0
BUCKET_BYTES = 64 << 20
PROBE_TOKENS = 8
MOVED = 0.01
"""Share of the elements."""
console = Console(width=150)


class Desk:
    """The rollout role's side of a sync."""

    def __init__(self, engine: EngineInfo) -> None:
        self._engine = engine

    def status(self) -> Status:
        return Status(0, 0, 0, 0, 0, {}, [self._engine])

    def hold(self, request: HoldRequest) -> HoldReply:
        return HoldReply("lease", [self._engine], PauseMode.RETRACT)

    def release(self, request: ReleaseRequest) -> None:
        if request.dirty:
            raise RuntimeError(f"the engine does not hold version {request.version}: {request.dirty}")


class Trainer:
    """Ranks of a layout, with the weights of a checkpoint."""

    def __init__(self, model: Path, layout: MegatronLayout) -> None:
        self.config: Mapping[str, Any] = json.loads((model / "config.json").read_text())
        self.family, self.layout = family_of(self.config), layout
        with HfCheckpoint(model) as tensors:
            self.dtype = tensors[next(iter(tensors))].dtype
            ranks = range(layout.world_size)
            self.placements = [self.family.megatron_placements(self.config, layout, rank) for rank in ranks]
            self.parameters: list[dict[str, torch.Tensor]] = []
            for placements in self.placements:
                shapes: dict[str, tuple[int, ...]] = {}
                for placed in placements:
                    before = shapes.get(placed.parameter, placed.at.stops)
                    shapes[placed.parameter] = tuple(map(max, before, placed.at.stops))
                made = {name: torch.zeros(shape, dtype=self.dtype) for name, shape in shapes.items()}
                scatter(placements, tensors, made, cast=True)
                self.parameters.append(made)

    def moved(self, seed: int) -> None:
        """Weights as after a step; replicas on several ranks stay equal."""
        change = neighbours(MOVED)
        for parameters in self.parameters:
            for name, parameter in parameters.items():
                parameter.copy_(change(parameter, np.random.default_rng([seed, crc32(name.encode())])))

    def syncers(self, transport: str, engine: EngineInfo, directory: Path) -> list[Callable[[int], dict[str, float]]]:
        """One for each rank that takes part."""
        served, desk = EngineLayout(engine.tensor_parallel), Desk(engine)
        ranks = self.layout.holders
        plan = plan_sync(self.config, self.family, self.layout, ranks, served, self.dtype, BUCKET_BYTES)
        if transport not in ("shards", "unstaged shards"):
            return [WeightSyncer(plan, None, lambda: self.parameters[0], desk, TIMEOUT_S, transport, directory).sync]

        def shape_of(count: int) -> SyncShape:
            topology = Topology(self.layout.world_size, served.world_size, count, served.world_size)
            return SyncShape(self.config, self.layout, served, topology, self.dtype)

        barrier, told = threading.Barrier(len(self.parameters)), dict[int, Any]()

        def exchange(rank: int, value: Any) -> list[Any]:
            told[rank] = value
            barrier.wait(TIMEOUT_S)
            found = [told[other] for other in range(len(self.parameters))]
            barrier.wait(TIMEOUT_S)
            return found

        model = ShardModel(plan, self.placements, shape_of)
        return [
            ShardSyncer(
                model,
                rank,
                lambda rank=rank: self.parameters[rank],  # type: ignore[misc]
                desk if rank == 0 else None,
                lambda value, rank=rank: exchange(rank, value),  # type: ignore[misc]
                TIMEOUT_S,
                transport == "shards",
            ).sync
            for rank in range(self.layout.world_size)
        ]


def synced(syncers: list[Callable[[int], dict[str, float]]], version: int) -> dict[str, float]:
    """All ranks at once; the phases of the first, and `total`."""
    others = [threading.Thread(target=sync, args=(version,)) for sync in syncers[1:]]
    for thread in others:
        thread.start()
    begun = time.monotonic()
    seconds = syncers[0](version)
    total = time.monotonic() - begun
    for thread in others:
        thread.join()
    stall = total - seconds.get("plan", 0.0) - seconds["hold"] - seconds["release"]
    return {"stall": stall} | seconds | {"total": total}


async def generated(server: Server, stop: Callable[[], bool]) -> tuple[int, float]:
    """Tokens, and over how many seconds, until `stop`."""
    params = SamplingParams(PROBE_TOKENS, temperature=0.0, extra={"ignore_eos": True})
    tokens, begun = 0, time.monotonic()
    async with server.client(TIMEOUT_S) as client:
        while not stop():
            await EngineClient.generate(client, [10, 20, 30], params)
            tokens += PROBE_TOKENS
    return tokens, time.monotonic() - begun


def beside(server: Server, work: Callable[[], Any]) -> tuple[float, Any]:
    """Tokens per second while `work` is done, and its result."""
    done, result = threading.Event(), list[Any]()

    def run() -> None:
        result.append(work())
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    tokens, seconds = asyncio.run(generated(server, done.is_set))
    thread.join()
    return tokens / seconds, result[0]


def measure(
    transport: str, trainer: Trainer, server: Server, engine: EngineInfo, syncs: int, run_dir: Path
) -> list[str]:
    """A row of the table."""
    syncers = trainer.syncers(transport, engine, run_dir)
    for version in range(syncs):
        trainer.moved(version)
        seconds = synced(syncers, version)
    floor = seconds.get("copy", 0.0) + seconds.get("digest", 0.0)
    ratio = f"{seconds['stall'] / floor:.2f}" if transport == "shards" else ""
    meanwhile = ""
    if transport == "shards":
        alone, _ = beside(server, lambda: time.sleep(5.0))
        during, again = beside(server, lambda: synced(syncers, syncs))
        meanwhile = f"{during:.1f} of {alone:.1f} /s over {again['total']:.2f} s"
    phases = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if name not in ("total", "stall"))
    return [transport, f"{seconds['total']:.2f}", f"{seconds['stall']:.2f}", f"{floor:.2f}", ratio, meanwhile, phases]


def main(
    model: Path,
    transports: Annotated[str, typer.Option()] = "shards,unstaged shards,broadcast,delta,ipc,disk",
    trainers: Annotated[
        int, typer.Option(help="trainer ranks of `shards`, which divide the model's heads; the others have one")
    ] = 2,
    syncs: Annotated[int, typer.Option()] = 3,
) -> None:
    """Start the engine, sync over each transport, print the table."""
    torch.set_num_threads(1)
    config = read_config(model)
    dtype = "bf16" if config.get("dtype", config.get("torch_dtype")) == "bfloat16" else "fp32"
    with tempfile.TemporaryDirectory() as directory:
        tree = {
            "name": "bench-sync",
            "output_dir": directory,
            "model": {"path": str(model), "dtype": dtype},
            "engine": {"context_tokens": min(2048, config["max_position_embeddings"])},
            "data": {"train_path": "unused.jsonl", "max_prompt_tokens": 64},
            "rollout": {"max_new_tokens": 64},
            "training": {"steps": 1, "prompts_per_step": 8},
        }
        server = start_server(spec_from_tree(tree, "bench_sync"), 0, detect_device())
        try:
            asyncio.run(server.wait_until_healthy(Deadline("the engine to start", TIMEOUT_S)))
            engine = EngineInfo(server.engine_id, server.url, server.admin_key, 1)
            table = Table("transport", "seconds", "stall", "copy + digest", "ratio", "tokens meanwhile", "phases")
            for transport in transports.split(","):
                layout = MegatronLayout(tensor=trainers if "shards" in transport else 1)
                table.add_row(*measure(transport, Trainer(model, layout), server, engine, syncs, Path(directory)))
            console.print(table)
        finally:
            server.stop()


if __name__ == "__main__":
    typer.run(main)
