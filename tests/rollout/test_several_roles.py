"""Two rollout roles as processes: the trainer's own client on one side, fake engines on the other, real rewards."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from fake_engine import FakeEngine
from tiny_models import make_tiny_model

from slimerl.engine.registration import register
from slimerl.resilience.deadline import Deadline
from slimerl.rollout.journal_file import TAKE_OVER
from slimerl.samples.messages import EngineState, HoldRequest, ReleaseRequest, address_file, process_of_engine
from slimerl.spec import SpecError, load_spec
from slimerl.training.rollout_client import ServiceFailed
from slimerl.training.several_rollouts import SeveralRollouts

START_S, PATIENCE_S = 120.0, 20.0
GROUPS, SIZE, STEPS, PROCESSES, PROMPTS = 4, 2, 2, 2, 10


def write_spec(directory: Path) -> Path:
    make_tiny_model("qwen3", directory / "model", num_hidden_layers=1, hidden_size=16)
    rows = [{"id": f"{n}", "prompt": f"{n}=", "answer": str(n)} for n in range(PROMPTS)]
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = {
        "name": "several",
        "output_dir": str(directory / "run"),
        "model": {"path": str(directory / "model")},
        "data": {
            "train_path": str(directory / "train.jsonl"),
            "eval_path": str(directory / "train.jsonl"),
            "max_prompt_tokens": 8,
        },
        "training": {"steps": STEPS, "prompts_per_step": GROUPS},
        "rollout": {"samples_per_prompt": SIZE, "max_new_tokens": 16, "processes": PROCESSES},
        "engine": {"replicas": 2},
        "deadlines": {"request_s": PATIENCE_S, "start_s": START_S},
    }
    path = directory / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    spec = write_spec(tmp_path)
    started: list[subprocess.Popen[bytes]] = []

    def role(process: int, *more: str) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "slimerl.rollout", str(spec), "--process", str(process), *more]
        with (tmp_path / f"role-{process}.log").open("ab") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return started[-1]

    yield role
    for each in started:
        each.kill()
        each.wait()


async def sync(client: SeveralRollouts, engines: list[FakeEngine], version: int) -> None:
    reply = await asyncio.to_thread(client.hold, HoldRequest(version, PATIENCE_S))
    assert sorted(each.engine_id for each in reply.engines) == ["engine-0", "engine-1"]
    for engine in engines:
        engine.version = str(version)
    whole = [engine.engine_id for engine in engines]
    await asyncio.to_thread(client.release, ReleaseRequest(reply.lease_id, version, whole))


async def connected(run_dir: Path, stack: AsyncExitStack) -> tuple[SeveralRollouts, list[FakeEngine]]:
    engines = [await stack.enter_async_context(FakeEngine(f"engine-{number}")) for number in range(2)]
    deadline = Deadline("the rollout roles to start", START_S)
    for index, engine in enumerate(engines):
        await register(engine.info, run_dir, deadline, process_of_engine(index, PROCESSES))
    connect = SeveralRollouts.connect_all
    return await asyncio.to_thread(connect, run_dir, deadline, PATIENCE_S, PROCESSES, START_S), engines


def test_a5_two_roles_serve_one_trainer_also_where_one_is_killed_while_weights_are_held(tmp_path, start):
    """Injected: the first role, which has the ledger, is killed while the engines of both are held for version 1."""
    run_dir = tmp_path / "run"

    async def again(role: "subprocess.Popen[bytes]", engine: FakeEngine) -> "subprocess.Popen[bytes]":
        """As the conductor does, and the engine's own role."""
        role.kill()
        role.wait()
        (run_dir / address_file(0)).unlink()
        following = start(0, TAKE_OVER)
        described = msgspec.structs.replace(engine.info, version=int(engine.version))
        await register(described, run_dir, Deadline("the rollout role to start again", START_S), 0)
        return following

    async def take(client: SeveralRollouts, step: int) -> dict[str, Any]:
        manifest = await asyncio.to_thread(client.next_batch, step, PATIENCE_S)
        assert sorted(manifest.shards.values()) == [0, 0, 1, 1]
        assert manifest.metrics["rollout/samples"] == GROUPS * SIZE
        assert manifest.metrics["rollout/engines"] == 2
        assert sum(value for name, value in manifest.metrics.items() if name in REWARDS) == GROUPS * SIZE
        ids = [each.sample_id for each in manifest.samples]
        shards = [manifest.shards[each.group_id] for each in manifest.samples]
        payloads = await asyncio.to_thread(client.fetch, ids, shards)
        await asyncio.to_thread(client.trained, manifest.batch_id, step)
        return {each.sample_id: (each.tokens, each.versions) for each in payloads}

    async def scene() -> None:
        roles = [start(process) for process in range(PROCESSES)]
        async with asyncio.timeout(2 * START_S), AsyncExitStack() as stack:
            client, engines = await connected(run_dir, stack)
            with pytest.raises(ServiceFailed, match="no weights have been released yet"):
                await asyncio.to_thread(client.next_batch, 1, 1.0)
            await sync(client, engines, 0)
            first = await take(client, 1)
            hold = await asyncio.to_thread(client.hold, HoldRequest(1, START_S))
            roles[0] = await again(roles[0], engines[0])
            whole = ReleaseRequest(hold.lease_id, 1, ["engine-0", "engine-1"])
            with pytest.raises(ServiceFailed, match="hold again and rewrite the engines"):
                await asyncio.to_thread(client.release, whole)
            status = await asyncio.to_thread(client.status)
            assert [each.state for each in status.engines] == [EngineState.JOINING, EngineState.SERVING]
            await sync(client, engines, 1)
            while (await asyncio.to_thread(client.status)).buffered < GROUPS * SIZE:
                await asyncio.sleep(0.02)
            state = await asyncio.to_thread(client.state)
            assert (state.steps, state.cursor, state.trained) == (1, 2 * GROUPS, GROUPS * SIZE)
            assert sum(len(group.samples) for group in state.groups) == GROUPS * SIZE, "of both"
            second = await take(client, 2)
            status = await asyncio.to_thread(client.status)
            assert status.admitted == status.trained == len(first | second) == GROUPS * SIZE * STEPS
            assert [each.engine_id for each in status.engines] == ["engine-0", "engine-1"]
            assert all(engine.calls["/generate"] == GROUPS // 2 * SIZE * STEPS for engine in engines)
            reply = await asyncio.to_thread(client.evaluate, 2, PATIENCE_S)
            assert (reply.version, reply.prompts) == (1, PROMPTS)
            assert {engine.calls["/generate"] for engine in engines} == {GROUPS // 2 * SIZE * STEPS + PROMPTS // 2}
            for role in roles:
                role.terminate()
            assert [await asyncio.to_thread(role.wait, 15) for role in roles] == [0, 0]

    asyncio.run(scene())


REWARDS = ("reward/correct", "reward/wrong", "reward/unparsable")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["engine.replicas=1"], "leaves some without an engine: engine.replicas = 1; raise it to 2"),
        (["rollout.port=4000"], "cannot all listen on rollout.port = 4000; set it to 0"),
        (["rollout.speculation.tier=exact"], "drafts are kept by one process"),
        (["algorithm.name=sft"], "takes its responses from the data; set rollout.processes: 1"),
        (
            ["engine.elastic.max=3", "cluster.placement=disaggregated", "training.steps=20"],
            "with engine.elastic.min = 1 some could be left without an engine; raise it to 2",
        ),
    ],
)
def test_what_several_processes_cannot_do_is_refused_with_the_fix(tmp_path, keys, message):
    spec = write_spec(tmp_path)
    with pytest.raises(SpecError, match=message):
        load_spec(spec, keys)
