"""A policy that asks a calculator and repeats its answer, and what stands around it. Tokens are characters.

What it says is a pure function of its prompt, its seed and what it has said and seen, wherever it is interrupted.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.environments.calculator import DESCRIPTION, calculate
from slimerl.environments.calls import UNKNOWN_TOOL, ToolAnswer, ToolCall, ToolMisused, misused
from slimerl.rewards.outcome import Failed
from slimerl.rollout.agents.formats import PlainFormat
from slimerl.rollout.agents.policy import Policy
from slimerl.rollout.agents.texts import Texts
from slimerl.rollout.agents.tool_loop import ToolLoop
from slimerl.rollout.dispatch import Completion, GenerateRequest
from slimerl.rollout.parts import Parts
from slimerl.samples.sample import Sample

STOP = 2
PROMPT = (10, 7)


class Characters:
    """The tokenizer: a token is a character's number; `STOP` is special."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token != STOP)

    def encode_piece(self, text: str, special: bool) -> list[int]:
        return [ord(character) for character in text if special or ord(character) != STOP]


def tokens_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def talk(tokens: Sequence[int], seed: int, turns: int = 2) -> list[int]:
    """The rest of the turn that the tokens are in, with its stop token: `turns` - 1 calls, then the last answer."""
    said = list(tokens[2:])
    for number in range(turns - 1):
        call = [*tokens_of(f"calc({tokens[1]}*{(seed + number) % 89 + 11})="), STOP]
        if len(said) < len(call):
            return call[len(said) :]
        seen = said[len(call) :]
        end = seen.index(ord("\n")) + 1
        answer, said = seen[: end - 1], seen[end:]
    whole = [*answer, STOP]
    return whole[len(said) :]


@dataclass
class HereToolbox:
    """A calculator without a process. `faults`: what the next calls come to."""

    faults: Iterator[Failed | None] = field(default_factory=lambda: iter(()))
    descriptions: tuple = (DESCRIPTION,)

    async def call(self, call: ToolCall) -> ToolAnswer | Failed:
        await asyncio.sleep(0)
        fault = next(self.faults, None)
        if fault is not None:
            return fault
        if call.name != "calc":
            return misused(UNKNOWN_TOOL, f"there is no tool {call.name}")
        try:
            return ToolAnswer(calculate(call.argument))
        except ToolMisused as error:
            return misused(error.failure, str(error))


@dataclass
class Talker:
    """In the place of engines. `most`: tokens of one answer at most, as when a request is interrupted."""

    say: Callable[[Sequence[int], int], list[int]] = talk
    most: int = 1_000_000
    version: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(
        self, request: GenerateRequest, started: Callable[[], None] = lambda: None, urgent: bool = False
    ) -> Completion:
        started()
        self.requests.append(request)
        tokens = self.say(request.tokens, request.params.seed or 0)
        count = min(len(tokens), request.params.max_new_tokens, self.most)
        reason = "stop" if count == len(tokens) else "length" if count == request.params.max_new_tokens else "abort"
        await asyncio.sleep(0)
        logprobs = [-token / 1000 for token in tokens[:count]]
        return Completion(Generation(tokens[:count], logprobs, [self.version] * count, reason, {}, {}), "e", 1)


def tool_loop(toolbox: object = None, max_turns: int = 4) -> ToolLoop:
    return ToolLoop(toolbox or HereToolbox(), PlainFormat(), Texts(Characters()), max_turns)  # type: ignore[arg-type]


def new_sample() -> Sample:
    return Sample("g/0", "g", "p", PROMPT)


def policy_of(sample: Sample, talker: Talker, budget: int = 100, chunk: int | None = None) -> Policy:
    params = SamplingParams(budget, stop_token_ids=(STOP,))
    return Policy(sample, replace(Parts(params, run_seed=3), chunk_tokens=chunk), talker)
