"""An agent program outside of a run, to be copied: what it does with the `openai` package is what is trained.

    slimerl run configs/quickstart.yaml agent.kind=external &
    python tools/external_agent_example.py runs/quickstart

It takes a task, talks to the policy as to any OpenAI server, and ends the task with a reward of its own (without one,
the run's reward judges the last reply). Here one completion is the whole conversation; several turns, tools, streams
and chat completions go the same way: whatever is asked with the task's key is its conversation.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import httpx
import openai

AT_ONCE = 64
START_S = 300.0


async def work(gateway: httpx.AsyncClient, program: openai.AsyncOpenAI) -> None:
    while True:
        response = await gateway.post("/v1/sessions", json={"wait_s": 30})
        if response.status_code == 204:
            continue  # no task at the moment
        task = response.raise_for_status().json()
        client = program.with_options(api_key=task["api_key"])
        reply = await client.completions.create(model="policy", prompt=task["prompt"], max_tokens=6)
        right = reply.choices[0].text.strip() == task["answer"]
        await gateway.post(f"/v1/sessions/{task['session_id']}/finish", json={"reward": float(right), "correct": right})


async def main(run_dir: Path) -> None:
    started = time.monotonic()
    while not (run_dir / "gateway.json").exists():
        if time.monotonic() - started > START_S:
            sys.exit(f"there is no {run_dir}/gateway.json: has the run started, with agent.kind: external?")
        await asyncio.sleep(0.5)
    address = json.loads((run_dir / "gateway.json").read_text())
    headers = {"Authorization": f"Bearer {address['token']}"}
    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    async with httpx.AsyncClient(base_url=address["url"], headers=headers, timeout=None, limits=limits) as gateway:
        program = openai.AsyncOpenAI(base_url=f"{address['url']}/v1", api_key=address["token"], timeout=1800)
        try:
            await asyncio.gather(*(work(gateway, program) for _ in range(AT_ONCE)))
        except (httpx.HTTPError, openai.APIConnectionError) as error:
            print(f"the run has ended: {error!r}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
