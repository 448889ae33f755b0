"""The rollout role as a process with a gateway: its address, tasks, a batch, its end; and the keys of the spec."""

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from fake_engine import FakeEngine
from gateway_scene import saying
from tiny_models import make_tiny_model

from slimerl.conductor.preflight.agent import agent_faults
from slimerl.engine.registration import register
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import GATEWAY_FILE, HoldRequest, ReleaseRequest
from slimerl.spec import RunSpec, SpecError, load_spec
from slimerl.training.several_rollouts import SeveralRollouts

START_S = 120.0


def written(directory: Path, **agent: Any) -> Path:
    """A spec, its model and its data."""
    if not (directory / "model").exists():
        make_tiny_model("qwen3", directory / "model", num_hidden_layers=1, hidden_size=16)
        rows = [json.dumps({"id": f"r{n}", "prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)]
        (directory / "train.jsonl").write_text("".join(rows))
    spec = {
        "name": "gateway-test",
        "output_dir": str(directory / "run"),
        "model": {"path": str(directory / "model")},
        "data": {"train_path": str(directory / "train.jsonl"), "max_prompt_tokens": 100},
        "training": {"steps": 2, "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 100},
        "agent": {"kind": "external", **agent},
        "deadlines": {"request_s": 20.0, "start_s": START_S},
    }
    path = directory / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


async def program(run_dir: Path) -> list[dict[str, Any]]:
    """Takes four tasks and ends them; what it was told."""
    address = json.loads((run_dir / GATEWAY_FILE).read_text())
    headers = {"Authorization": f"Bearer {address['token']}"}
    tasks = []
    async with aiohttp.ClientSession(address["url"], headers=headers) as http:
        for _ in range(4):
            async with http.post("/v1/sessions", json={}) as response:
                task = await response.json()
            body = {"messages": task["messages"]}
            own = {"Authorization": f"Bearer {task['api_key']}"}
            async with http.post("/v1/chat/completions", json=body, headers=own) as response:
                task["reply"] = (await response.json())["choices"][0]["message"]["content"]
            async with http.post(f"/v1/sessions/{task['session_id']}/finish", json={}) as response:
                assert response.status == 200
            tasks.append(task)
    return tasks


async def step(run_dir: Path, processes: int) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        deadline, engines = Deadline("the rollout roles to start", START_S), []
        for process in range(processes):
            engine = FakeEngine(f"engine-{process}", saying(lambda prompt, seed: str(seed % 9)))
            engines.append(await stack.enter_async_context(engine))
            await register(engine.info, run_dir, deadline, process)
        connected = SeveralRollouts.connect_all, run_dir, deadline, 10.0, processes
        trainer = await asyncio.to_thread(*connected)
        lease = await asyncio.to_thread(trainer.hold, HoldRequest(0, 10.0))
        for engine in engines:
            engine.version = "0"
        whole = [engine.engine_id for engine in engines]
        await asyncio.to_thread(trainer.release, ReleaseRequest(lease.lease_id, 0, whole))
        tasks = await program(run_dir)
        manifest = await asyncio.to_thread(trainer.next_batch, 1, 20.0)
        assert len(manifest.samples) == 4
        assert manifest.metrics["gateway/sessions_finished"] == 4
        rewards = sorted(sample.reward for sample in manifest.samples)
        assert rewards == sorted(float(task["reply"] == task["answer"]) for task in tasks), "the run's reward judged"
        await asyncio.to_thread(trainer.shutdown)
        return tasks


@pytest.mark.parametrize("processes", [1, 2])
def test_a_program_finds_the_gateway_and_its_work_becomes_the_batch(tmp_path, processes):
    """Of several rollout processes it talks to the first, and makes the samples of all."""
    run_dir, log, spec = tmp_path / "run", tmp_path / "role.log", written(tmp_path)
    command = [sys.executable, "-m", "slimerl.rollout", str(spec), f"rollout.processes={processes}"]
    command.append(f"engine.replicas={processes}")
    with log.open("ab") as out:
        numbers = [["--process", str(process)] for process in range(processes)]
        roles = [subprocess.Popen([*command, *number], stdout=out, stderr=out) for number in numbers]
    try:
        Deadline("the gateway's address", START_S).wait_until((run_dir / GATEWAY_FILE).exists)
        assert oct((run_dir / GATEWAY_FILE).stat().st_mode)[-3:] == "600"
        tasks = asyncio.run(step(run_dir, processes))
        for role in roles[1:]:
            role.terminate()
        assert [role.wait(15) for role in roles] == [0] * processes, log.read_text()
    finally:
        for role in roles:
            role.kill()
            role.wait()
    assert not list(run_dir.glob("gateway*.json"))
    rows = {f"r{n}": (f"{n}+1=", str(n + 1)) for n in range(8)}
    assert {task["prompt_id"]: (task["prompt"], task["answer"]) for task in tasks}.items() <= rows.items()
    assert "Traceback" not in log.read_text()


def spec_with(directory: Path, *overrides: str, **agent: Any) -> RunSpec:
    return load_spec(written(directory, **agent), overrides)


def test_s1_the_keys_of_the_gateway_are_strict(tmp_path):
    spec = spec_with(tmp_path)
    assert (spec.agent.port, spec.agent.silent_s, spec.agent.branch) == (0, 600.0, "finished")
    for agent, told in (
        ({"ports": 1}, "ports"),
        ({"port": 70_000}, "port"),
        ({"silent_s": 0}, "silent_s"),
        ({"branch": "some"}, "branch"),
        ({"tools": ["calc"]}, "tools"),
    ):
        with pytest.raises(SpecError, match=told):
            spec_with(tmp_path, **agent)
    with pytest.raises(SpecError, match=r"agent\.kind external"):
        spec_with(tmp_path, "algorithm.name=sft")
    with pytest.raises(SpecError, match="port"):
        spec_with(tmp_path, "agent.kind=single_turn", port=8000)


def test_s3_a_chat_template_that_cannot_be_gone_on_with_is_refused_before_the_run(tmp_path):
    spec = spec_with(tmp_path)
    assert agent_faults(spec) == []
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    (fault,) = agent_faults(spec)
    assert fault.startswith("agent.kind external: the chat template does not write what a reply says as it stands")
