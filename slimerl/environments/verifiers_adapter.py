"""Environments of verifiers 0.1: `environment: verifiers`, with `options: {environment: NAME, …}`.

Flows in: rows whose answer is the number of an example in the environment's data set, as `rows` writes them.
Flows out: an `Environment` whose observations are the messages of `env_response`, and whose reward at the end is that
of the environment's rubric. Tools that verifiers calls itself (`ToolEnv`) need messages with tool calls in them, and
are refused; newer verifiers drive a server of chat completions instead of being driven.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import verifiers

from slimerl.environments.environment import Environment, OneByOne, Step, Task


def make(environment: str, **arguments: Any) -> Environment:
    """Raises ValueError: its messages need more than text."""
    made = verifiers.load_environment(environment, **arguments)
    if getattr(made, "oai_tools", None):
        raise ValueError(f"the verifiers environment {environment} calls tools, whose messages are more than text")
    loop = asyncio.new_event_loop()
    return OneByOne(lambda: _Rollout(made, loop))


def rows(environment: str, size: int, **arguments: Any) -> Iterator[dict[str, str]]:
    """Rows of a data file: the first `size` examples, the user's message as prompt."""
    dataset = verifiers.load_environment(environment, **arguments).get_dataset(n=size)
    for index, example in enumerate(dataset):
        answer = json.dumps({"index": index, "size": size})
        yield {"id": f"{environment}-{index}", "prompt": _text(example["prompt"][-1:]), "answer": answer}


class _Rollout:
    """As `MultiTurnEnv.rollout` goes, with the policy outside."""

    def __init__(self, environment: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._environment, self._loop = environment, loop

    def reset(self, task: Task) -> str:
        row = json.loads(task.answer)
        example = dict(self._environment.get_dataset(n=row["size"])[row["index"]])
        self._state = self._loop.run_until_complete(self._started(example))
        self._prompt = self._state["prompt"]
        return ""

    def step(self, action: str) -> Step:
        return self._loop.run_until_complete(self._stepped(action))

    async def _started(self, example: dict[str, Any]) -> Any:
        state = await self._environment.init_state(example, None, "", None)
        return await self._environment.setup_state(state)

    async def _stepped(self, action: str) -> Step:
        said = [{"role": "assistant", "content": action}]
        turn = {"prompt": self._prompt, "completion": said, "response": None, "tokens": None}
        self._state["trajectory"].append({**turn, "reward": None, "advantage": None, "extras": {}})
        if await self._environment.is_completed(self._state):
            return await self._scored()
        before = len(self._prompt) + len(said)
        self._prompt = await self._environment.get_prompt_messages(self._state)
        if await self._environment.is_completed(self._state):
            return await self._scored()
        return Step(_text(self._prompt[before:]))

    async def _scored(self) -> Step:
        await self._environment.rubric.score_rollout(self._state, asyncio.Semaphore(1))
        reward = float(self._state["reward"])
        return Step(reward=reward, done=True, correct=reward >= 1.0)


def _text(messages: list[dict[str, Any]]) -> str:
    return "\n".join(str(message["content"]) for message in messages)
