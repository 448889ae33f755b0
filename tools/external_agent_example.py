"""An agent program outside of a run, to be copied: what it does with the `openai` package is what is trained.

    slimerl run configs/quickstart.yaml agent.kind=external &
    python tools/external_agent_example.py runs/quickstart

It takes a task, talks to the policy as to any OpenAI server, and ends the task with a reward of its own (without one,
the run's reward judges the last reply). Replies are read as they are written, and tools that they call are run; a model
without a chat template is asked for a completion. Whatever is asked with the task's key is its conversation.

It tells what part of the tasks came out right, and in the end of the first and of the last ones.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

AT_ONCE = 64
START_S = 300.0
TURNS = 4
SHOWN = 500
"""Tasks of which the part is told that came out right."""
CALCULATOR = {"name": "calc", "description": "The result of one sum or product, like 12*34."}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
TOOLS: Any = [{"type": "function", "function": {**CALCULATOR, "parameters": PARAMETERS}}]


# --- the agent


async def converse(client: openai.AsyncOpenAI, task: dict[str, Any]) -> str:
    """The answer to a task, after as many calls of tools as the policy wants."""
    messages = list(task["messages"])
    for _ in range(TURNS):
        try:
            message = await read_reply(client, messages)
        except openai.BadRequestError as error:
            if error.code != "no_chat_template":
                raise
            return await read_completion(client, task["prompt"])
        messages.append(message)
        if "tool_calls" not in message:
            return message["content"]
        for call in message["tool_calls"]:
            answer = calculate(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
    return ""


async def read_reply(client: openai.AsyncOpenAI, messages: Sequence[Any]) -> dict[str, Any]:
    """One turn, read while it is written: text, and calls in pieces."""
    text = ""
    calls: dict[int, dict[str, str]] = {}
    stream = await client.chat.completions.create(model="policy", messages=list(messages), tools=TOOLS, stream=True)
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                call = calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += piece.id or ""
                if piece.function is not None:
                    call["name"] += piece.function.name or ""
                    call["arguments"] += piece.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {key: call[key] for key in ("name", "arguments")}}
            for call in calls.values()
        ]
    return message


async def read_completion(client: openai.AsyncOpenAI, prompt: str) -> str:
    stream = await client.completions.create(model="policy", prompt=prompt, stream=True)
    return "".join([choice.text async for chunk in stream for choice in chunk.choices])


def calculate(arguments: str) -> str:
    try:
        found = re.fullmatch(r"(\d+)([+*])(\d+)", str(json.loads(arguments)["x"]))
    except (ValueError, KeyError, TypeError):
        found = None
    if found is None:
        return "error"
    first, sign, second = found.groups()
    return str(int(first) + int(second) if sign == "+" else int(first) * int(second))


# --- the run's tasks


@dataclass
class Tally:
    """Of tasks of one kind: which came out right, in their order."""

    kind: str
    right: list[bool] = field(default_factory=list)

    def add(self, right: bool) -> None:
        self.right.append(right)
        if len(self.right) % SHOWN == 0:
            print(
                f"{self.kind}: {len(self.right)} done, of the last {SHOWN} {part(self.right[-SHOWN:])} right",
                flush=True,
            )

    def tell(self) -> None:
        count = min(SHOWN, len(self.right))
        first, last = self.right[:count], self.right[len(self.right) - count :]
        print(
            f"{self.kind}: {len(self.right)} done; right of the first {count}: {part(first)}, of the last: {part(last)}"
        )


def part(right: Sequence[bool]) -> str:
    return f"{100 * sum(right) / len(right):.1f} %" if right else "-"


async def work(gateway: httpx.AsyncClient, program: openai.AsyncOpenAI, tallies: dict[bool, Tally]) -> None:
    while True:
        response = await gateway.post("/v1/sessions", json={"wait_s": 30})
        if response.status_code == 503:
            return  # the run is ending
        if response.status_code == 204:
            continue  # no task at the moment
        task = response.raise_for_status().json()
        path = f"/v1/sessions/{task['session_id']}/finish"
        try:
            answer = await converse(program.with_options(api_key=task["api_key"]), task)
        except openai.APIStatusError as error:
            await gateway.post(path, json={"error": str(error)})
            continue
        right = answer.strip() == task["answer"]
        await gateway.post(path, json={"reward": float(right), "correct": right})
        tallies[task["evaluation"]].add(right)


async def main(run_dir: Path) -> None:
    started = time.monotonic()
    while not (run_dir / "gateway.json").exists():
        if time.monotonic() - started > START_S:
            sys.exit(f"there is no {run_dir}/gateway.json: has the run started, with agent.kind: external?")
        await asyncio.sleep(0.5)
    address = json.loads((run_dir / "gateway.json").read_text())
    headers = {"Authorization": f"Bearer {address['token']}"}
    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    tallies = {False: Tally("training"), True: Tally("held out")}
    async with (
        httpx.AsyncClient(base_url=address["url"], headers=headers, timeout=None, limits=limits) as gateway,
        openai.AsyncOpenAI(base_url=f"{address['url']}/v1", api_key=address["token"], timeout=1800) as program,
    ):
        with suppress(httpx.HTTPError, openai.APIConnectionError):
            await asyncio.gather(*(work(gateway, program, tallies) for _ in range(AT_ONCE)))
    print("the run has ended")
    for tally in tallies.values():
        tally.tell()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
