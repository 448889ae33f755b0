"""The agent loop: can its tools, functions and environment be had here?

Flows in: the spec. Flows out: faults by key. Functions are really loaded, and a sandbox is really made.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from slimerl.conductor.preflight.reward import sandbox_trouble
from slimerl.environments.tool_worker import describe
from slimerl.rollout.agents.build import announced, load_loop, tool_format
from slimerl.rollout.gateway.build import checked_text
from slimerl.rollout.tokenizer import PromptTokenizer, TokenizerError
from slimerl.spec import RunSpec
from slimerl.spec.agent import ExternalAgent, FunctionAgent, ToolsAgent
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
        try:
            checked_text(PromptTokenizer(spec.model.path, spec.data))
        except TokenizerError as error:
            yield str(error)
    if isinstance(agent, ToolsAgent):
        descriptions = [describe(tool) for tool in agent.tools]
        trouble = sandbox_trouble() if "python" in agent.tools else None
        if trouble is not None:
            yield f"agent.tools: python is refused, since programs of the model would run without a sandbox: {trouble}"
        if agent.format == "hermes":
            try:
                tokenizer = PromptTokenizer(spec.model.path, spec.data)
            except TokenizerError:
                return  # told of the data
            try:
                tool_format(agent, descriptions, tokenizer)
            except TokenizerError as error:
                yield str(error)
