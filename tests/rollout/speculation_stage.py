"""A dispatcher with drafts in front of an engine whose policy is known, and the laws of what it should answer."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from msgspec.structs import replace
from policy_engine import STOP, TOKENS, Policy, PolicyEngine, policy

from slimerl.engine.protocol import SamplingParams
from slimerl.rollout.dispatch import Completion, Dispatcher, GenerateRequest
from slimerl.rollout.prompts import sampling_seed
from slimerl.rollout.router import LeastLoaded
from slimerl.rollout.speculation.dispatcher import Speculation, SpeculativeDispatcher
from slimerl.samples.messages import EngineInfo
from slimerl.spec.speculation import SpeculationSpec

PROMPT = (5, 1, 4, 2, 3)
OLD, NEW = policy(1), 0.6 * policy(1) + 0.4 * policy(2)
LENGTH = 6
PARAMS = SamplingParams(LENGTH, stop_token_ids=(STOP,))


@dataclass
class Stage:
    engine: PolicyEngine
    dispatcher: Dispatcher
    speculation: Speculation | None = None

    async def sample(self, epoch: int, number: int, prompt: str = "p", **changes: Any) -> Completion:
        return await self.dispatcher.generate(request(epoch, number, prompt, **changes))

    async def epoch(self, epoch: int, count: int, prompt: str = "p") -> list[Completion]:
        return list(await asyncio.gather(*(self.sample(epoch, number, prompt) for number in range(count))))

    def serve(self, version: int) -> None:
        self.engine.version = version
        self.dispatcher.router.release(version, ["engine-0"], {})


def request(epoch: int, number: int, prompt: str = "p", **changes: Any) -> GenerateRequest:
    sample = f"{epoch}/{prompt}/{number}"
    params = replace(PARAMS, seed=sampling_seed(7, sample, 0), **changes)
    return GenerateRequest(sample, f"{epoch}/{prompt}", PROMPT, params, sample)


@asynccontextmanager
async def stage(tier: str = "exact", policies: tuple[Policy, ...] = (OLD, NEW), **options: Any) -> AsyncIterator[Stage]:
    """One engine that serves version 0."""
    engine = PolicyEngine(*policies)
    router = LeastLoaded(capacity=options.pop("capacity", 64))
    router.join(EngineInfo("engine-0", "", "", 1))
    router.release(0, ["engine-0"], {})
    engines = {"engine-0": engine}
    if tier == "none":
        made = Stage(engine, Dispatcher(router, engines, 10.0))
    else:
        file = options.pop("file", None)
        lenience = {"log_lenience": 0.5} if tier == "lenient" else {}
        spec = SpeculationSpec(tier=tier, **lenience, **options)
        speculation = Speculation(spec, 7, TOKENS, spec.log_lenience or 0.0, file)
        made = Stage(engine, SpeculativeDispatcher(router, engines, 10.0, speculation=speculation), speculation)
    async with asyncio.timeout(60):
        yield made
    await made.dispatcher.close()


def log_law(law: Policy, tokens: list[int]) -> list[float]:
    return [math.log(law[before, token]) for before, token in pairwise([PROMPT[-1], *tokens])]
