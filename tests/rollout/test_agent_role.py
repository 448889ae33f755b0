"""The rollout role with tools and with an environment, as a process: their workers come and go with it."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from fake_engine import FakeEngine
from test_rollout_role import GROUPS, SIZE, Files, files, gone, model_path, start, sync, with_engines  # noqa: F401

from slimerl.samples.messages import BatchManifest
from slimerl.training.rollout_client import RolloutClient

ROOM = Path(__file__).parents[1] / "environments"
AGENTS: dict[str, dict[str, Any]] = {
    "tools": {"kind": "tools", "tools": ["calc", "python"], "format": "plain", "max_turns": 2},
    "environment": {
        "kind": "environment",
        "environment": "foreign_tools:guess",
        "max_turns": 3,
        "workers": 2,
        "reward": "sum",
    },
}


def talkative(model_path: Path, kind: str) -> Callable[[Sequence[int], int], list[int]]:  # noqa: F811
    """Asks the calculator and repeats its answer; or guesses one number after the other."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)

    def answer(tokens: Sequence[int], seed: int) -> list[int]:
        prompt, _, since = tokenizer.decode(tokens, skip_special_tokens=True).partition("=")
        seen = since.splitlines()
        text = seen[-1].partition("=")[2] if seen else f"calc({prompt})="
        if kind == "environment":
            text = str(len(seen))
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    return answer


@pytest.mark.parametrize("kind", AGENTS)
def test_a5_a_role_makes_samples_in_turns_and_leaves_no_worker(files, start, monkeypatch, kind):  # noqa: F811
    monkeypatch.setenv("PYTHONPATH", str(ROOM), prepend=":")
    path = files.write()
    spec = yaml.safe_load(path.read_text()) | {"agent": AGENTS[kind]}
    spec["rollout"]["max_new_tokens"] = 80
    path.write_text(yaml.safe_dump(spec))
    role = start(path)

    async def scene(client: RolloutClient, engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.answer = talkative(files.model_path, kind)
        workers = role.workers()
        if kind == "environment":
            assert len(workers) == AGENTS[kind]["workers"], "nobody asks the reward: it has none"
        assert len(workers) >= 2, "of the agent, and of the reward of one with tools"
        await sync(client, engines, 0)
        before = await asyncio.to_thread(client.evaluate, 0, 60.0)
        assert before.failures == 0
        manifest = await asyncio.to_thread(client.next_batch, 1, 60.0)
        assert len(manifest.samples) == GROUPS * SIZE
        check(manifest, before.accuracy, kind)
        await asyncio.to_thread(client.trained, manifest.batch_id, 1)
        await asyncio.to_thread(client.shutdown)
        assert await asyncio.to_thread(role.exit_code) == 0, role.text()
        assert gone(workers)

    with_engines(files, scene)
    assert "Traceback" not in role.text()


def check(manifest: BatchManifest, accuracy: float, kind: str) -> None:
    assert manifest.metrics["rollout/observed_fraction"] > 0
    assert not [name for name in manifest.metrics if name.startswith("rollout/dropped_")]
    if kind == "tools":
        assert accuracy == 1.0
        assert manifest.metrics["rollout/turns_mean"] == 2
        assert manifest.metrics["agent/tool_calls"] == GROUPS * SIZE
        assert {(sample.reward, sample.correct) for sample in manifest.samples} == {(1.0, True)}
        return
    for sample in manifest.samples:
        # guesses 1, 2 and 3; each that is wrong costs a tenth
        first, second = map(int, sample.group_id.partition("/")[2].split("+"))
        found = 1 <= first + second <= 3
        assert sample.correct == found
        assert sample.reward == pytest.approx(1 - 0.1 * (first + second - 1) if found else -0.3)
    assert manifest.metrics["rollout/turns_max"] == 3
