"""The agent loop: can its tools, functions and environment be had here?

Flows in: the spec. Flows out: faults by key. Functions are really loaded, and a sandbox is really made.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from slimerl.conductor.preflight.reward import sandbox_trouble
from slimerl.environments.made import load_maker
from slimerl.environments.tool_worker import describe
from slimerl.rollout.agents.build import announced, environment_frames, load_loop, tool_format
from slimerl.rollout.gateway.build import checked_text
from slimerl.rollout.tokenizer import PromptTokenizer, TokenizerError
from slimerl.spec import RunSpec
from slimerl.spec.agent import EnvironmentAgent, ExternalAgent, FunctionAgent, ToolsAgent
from slimerl.spec.functions import CustomFunctionError


def announced_tools(spec: RunSpec) -> list[Mapping[str, Any]]:
    """What prompts tell of tools; nothing where `agent_faults` names a function that cannot be loaded."""
    try:
        return announced(spec.agent)
    except CustomFunctionError:
        return []


def agent_faults(spec: RunSpec) -> list[str]:
    """Nothing for a run that samples no responses."""
    try:
        return list(_faults(spec)) if spec.uses_engines else []
    except CustomFunctionError as error:
        return [str(error)]


def _faults(spec: RunSpec) -> Iterator[str]:
    agent = spec.agent
    if isinstance(agent, FunctionAgent):
        load_loop(agent.function)
    if isinstance(agent, ExternalAgent):
        yield from _template_faults(spec, checked_text)
    if isinstance(agent, EnvironmentAgent):
        load_maker(agent.environment, agent.options)
        yield from _template_faults(spec, environment_frames)
    if isinstance(agent, ToolsAgent):
        descriptions = [describe(tool) for tool in agent.tools]
        trouble = sandbox_trouble() if "python" in agent.tools else None
        if trouble is not None:
            yield f"agent.tools: python is refused, since programs of the model would run without a sandbox: {trouble}"
        yield from _template_faults(spec, partial(tool_format, agent, descriptions))


def _template_faults(spec: RunSpec, frame: Callable[[PromptTokenizer], Any]) -> Iterator[str]:
    # programs have prompts of their own, whatever those of the data are like
    if not spec.data.chat_template and not isinstance(spec.agent, ExternalAgent):
        return
    try:
        tokenizer = PromptTokenizer(spec.model.path, spec.data)
    except TokenizerError:
        return  # told of the data
    try:
        frame(tokenizer)
    except TokenizerError as error:
        yield str(error)
