"""An OpenAI program, unchanged, in a process of its own, against a real SGLang server whose weights are updated."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_program import TOOLS
from engine_fixtures import Engines
from gateway_scene import Front, ids, join_real, play

from slimerl.engine.fleet import EngineFleet
from slimerl.engine.protocol import SamplingParams
from slimerl.samples.messages import HoldRequest, ReleaseRequest
from slimerl.samples.sample import response_arrays

PROGRAMS, TURNS = 4, 3


async def run_program(front: Front, task: dict[str, Any]) -> list[str]:
    """As a user starts it."""
    environment = {**os.environ, "OPENAI_BASE_URL": f"{front.url}/v1", "OPENAI_API_KEY": task["api_key"]}
    program = str(Path(__file__).with_name("client_program.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, task["prompt"], str(TURNS), env=environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    await front.post(f"/v1/sessions/{task['session_id']}/finish", {"reward": 1.0})
    return json.loads(output)


def test_m6_what_an_unchanged_program_did_is_trained_exactly_as_the_engine_computed_it(engines: Engines):
    """Reference: the engine's own log-probabilities of each whole conversation, computed anew. While the programs talk,
    three updates of the weights' version come in between."""
    engine = engines("qwen3")
    engine_id = engine.info.engine_id

    async def update(front: Front, version: int) -> None:
        lease = await front.scene.weights.hold(HoldRequest(version, 60.0))

        def written() -> None:
            with EngineFleet(lease.engines, 60.0, lease.pause) as fleet:
                fleet.pause()
                fleet.begin_weight_update()
                fleet.end_weight_update(version)
                fleet.flush_cache()
                fleet.continue_generation()

        await asyncio.to_thread(written)
        front.scene.weights.release(ReleaseRequest(lease.lease_id, version, [engine_id]))

    async def act(front: Front) -> None:
        scene = front.scene
        client = await join_real(front, engine)
        talking = [asyncio.ensure_future(run_program(front, await front.take())) for _ in range(PROGRAMS)]
        await scene.until(lambda: scene.scheduler.dispatcher.in_flight > 0)
        for version in (1, 2, 3):
            await update(front, version)
        replies = await asyncio.gather(*talking)
        assert [len(each) for each in replies] == [TURNS] * PROGRAMS
        manifest = await scene.batch(1, timeout_s=30.0)
        assert len(manifest.samples) == PROGRAMS
        assert scene.store.counts().dropped == {}
        for payload in scene.store.payloads([sample.sample_id for sample in manifest.samples]):
            arrays = response_arrays(payload)
            sampled = [place for place, mark in enumerate(arrays["sampled"]) if mark]
            assert arrays["versions"][sampled[0]] <= arrays["versions"][sampled[-1]] <= 3
            again = await client.generate(arrays["tokens"], SamplingParams(1), extra={"logprob_start_len": 0})
            computed = np.array([pair[0] or 0.0 for pair in again.meta["input_token_logprobs"]])
            at = np.array(sampled) + payload.prompt_length
            recorded = np.array(arrays["behavior_logprobs"])[sampled]
            assert recorded == pytest.approx(computed[at], abs=2e-4)
            question = payload.sample_id.split("/")[1].removeprefix("p")
            opening = front.gateway.desk.text.frame.opening(
                [{"role": "user", "content": f"question {question}"}], TOOLS, {}
            )
            assert arrays["tokens"][: payload.prompt_length] == ids(opening)

    play(
        act,
        engines=0,
        groups=1,
        size=PROGRAMS,
        steps=1,
        max_new_tokens=400,
        patience_s=150,
        engine_s=60.0,
        request_s=60.0,
    )
