"""From the `agent` section of a spec to the loop that makes samples.

Flows in: an `AgentSpec`, later the tokenizer. Flows out: a `RunningAgent`, not yet started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, Protocol

from slimerl.environments.calls import ToolDescription
from slimerl.environments.episodes import EpisodePool
from slimerl.environments.tool_worker import describe
from slimerl.environments.toolbox import Toolbox
from slimerl.rewards.outcome import Outcome
from slimerl.rollout.agents.chat_frames import ChatFrames, NoFrame
from slimerl.rollout.agents.environment_loop import EnvironmentLoop, Frame
from slimerl.rollout.agents.formats import HermesFormat, PlainFormat, ToolFormat
from slimerl.rollout.agents.loop import AgentLoop, SingleTurn
from slimerl.rollout.agents.policy import Policy
from slimerl.rollout.agents.texts import Foreign, Piece, Texts
from slimerl.rollout.agents.tool_loop import ToolLoop
from slimerl.rollout.gateway.external import ExternalAgents
from slimerl.rollout.gateway.sessions import Sessions
from slimerl.rollout.prompts import Prompt
from slimerl.rollout.tokenizer import PromptTokenizer, TokenizerError
from slimerl.samples.sample import Sample
from slimerl.spec.agent import (
    AnyAgent,
    EnvironmentAgent,
    ExternalAgent,
    FunctionAgent,
    SingleTurnAgent,
    ToolsAgent,
)
from slimerl.spec.functions import CustomFunctionError, load_function

PARAMETERS = ("policy", "sample", "prompt", "texts")
"""async (policy: Policy, sample: Sample, prompt: Prompt, texts: Texts) → an `Outcome` or None, as `AgentLoop`."""


class Service(Protocol):
    """Processes that a loop needs."""

    async def start(self) -> None:
        """Raises RewardUnavailable."""

    async def close(self) -> None: ...


@dataclass
class RunningAgent:
    """`loop` may be called from `start` to `close`; both are safe to call when the other has failed."""

    spec: AnyAgent
    service: Service | None = None
    _texts: Texts | None = None

    async def start(self) -> None:
        """Raises RewardUnavailable."""
        if self.service is not None:
            await self.service.start()

    async def close(self) -> None:
        if self._texts is not None:
            self._texts.close()
        if self.service is not None:
            await self.service.close()

    def loop(self, tokenizer: PromptTokenizer) -> AgentLoop:
        """Raises TokenizerError, CustomFunctionError."""
        if isinstance(self.spec, SingleTurnAgent):
            return SingleTurn()
        if isinstance(self.spec, ExternalAgent):
            return ExternalAgents(Sessions(), self.spec.silent_s, self.spec.branch)
        self._texts = Texts(tokenizer)
        if isinstance(self.spec, FunctionAgent):
            return FunctionLoop(self.spec.function, self._texts)
        if isinstance(self.spec, ToolsAgent) and isinstance(self.service, Toolbox):
            form = tool_format(self.spec, self.service.descriptions, tokenizer)
            return ToolLoop(self.service, form, self._texts, self.spec.max_turns)
        if isinstance(self.spec, EnvironmentAgent) and isinstance(self.service, EpisodePool):
            frame, opening = environment_frames(tokenizer)
            turns, reward = self.spec.max_turns, self.spec.reward
            return EnvironmentLoop(self.service, self._texts, frame, opening, turns, reward)
        raise AssertionError(f"no agent of kind {self.spec}")


def build_agent(spec: AnyAgent) -> RunningAgent:
    """Raises CustomFunctionError."""
    if isinstance(spec, ToolsAgent):
        return RunningAgent(spec, Toolbox.of(spec))
    return RunningAgent(spec, EpisodePool.of(spec) if isinstance(spec, EnvironmentAgent) else None)


def announced(spec: AnyAgent) -> list[Mapping[str, Any]]:
    """Tools that a chat template is to tell the policy of. Raises CustomFunctionError."""
    if isinstance(spec, ToolsAgent) and spec.format == "hermes":
        return [describe(tool).schema() for tool in spec.tools]
    return []


def tool_format(spec: ToolsAgent, tools: Sequence[ToolDescription], tokenizer: PromptTokenizer) -> ToolFormat:
    """Raises TokenizerError: the chat template knows no answers of tools."""
    if spec.format == "plain":
        return PlainFormat()
    try:
        frames = ChatFrames(tokenizer.render, tokenizer.stop_texts, role="tool")
    except NoFrame as error:
        raise TokenizerError(f"agent.format hermes: {error}; take another template, or agent.format: plain") from error
    return HermesFormat.of(tools, frames.around)


def environment_frames(tokenizer: PromptTokenizer) -> tuple[Frame, Frame | None]:
    """Of observations, and of the one before the first action: with a chat template, turns of the user's, else lines.

    Raises:
        TokenizerError: the chat template takes no second turn of the user's.
    """
    if not tokenizer.has_turns:
        return _line, _line
    try:
        frames = ChatFrames(tokenizer.render, tokenizer.stop_texts, role="user")
    except NoFrame as error:
        raise TokenizerError(f"agent.kind environment: {error}; take another template, or none") from error
    before, behind = frames.around(1)
    return lambda text: [before, Foreign(text), behind], None


def _line(text: str) -> list[Piece]:
    return [Foreign(text), "\n"]


class FunctionLoop:
    """A loop of the user's."""

    def __init__(self, function: str, texts: Texts) -> None:
        """Raises CustomFunctionError."""
        self._function, self._texts = load_loop(function), texts

    async def __call__(self, policy: Policy, sample: Sample, prompt: Prompt) -> Outcome | None:
        return await self._function(policy, sample, prompt, self._texts)


def load_loop(path: str) -> Any:
    """Raises CustomFunctionError."""
    function = load_function(path, PARAMETERS, "agent.function")
    if not iscoroutinefunction(function):
        raise CustomFunctionError(f"agent.function: {path} must be an async function")
    return function
