"""The `agent` section: what happens between the tokens that a policy samples, one variant for each `kind`.

Flows in: the section's keys. Flows out: an `AgentSpec`.
Invariant: a variant has the keys that its kind reads and no others; a key of another kind is refused with its name.
"""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from slimerl.spec.fields import Positive, Seconds, Strict, Workers, tuple_from_list
from slimerl.spec.functions import ImportPath

DEFAULT_KIND = "single_turn"

TOOLS = ("calc", "python")
ENVIRONMENTS = ("reasoning_gym", "verifiers")


def _known_or_function(what: str, known: tuple[str, ...]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            raise ValueError(
                f"there is no {what} '{name}'; choose one of {', '.join(known)}, or name a function of yours as "
                "package.module:function"
            )
        return name

    return AfterValidator(check)


ToolName = Annotated[str, _known_or_function("tool", TOOLS)]
EnvironmentName = Annotated[str, _known_or_function("environment", ENVIRONMENTS)]


class AnyAgent(Strict):
    """What all kinds have in common."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_read(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            others = [kind_of(each) for each in KINDS if key in each.model_fields]
            if key not in cls.model_fields and others:
                raise ValueError(
                    f"kind {kind_of(cls)} does not read '{key}', which belongs to {' and '.join(others)}; drop it"
                )
        return given


class SingleTurnAgent(AnyAgent):
    """One answer to the prompt."""

    kind: Literal["single_turn"] = "single_turn"


class _InTurns(AnyAgent):
    """Turns of the policy, and what it observes between them, made in processes of this machine."""

    max_turns: Positive = 8
    """Of the policy. What it observes counts towards rollout.max_new_tokens."""
    workers: Workers = 1
    timeout_s: Seconds = 60.0
    """For one call or step; a worker that takes longer is killed and replaced, and the sample is dropped."""


class ToolsAgent(_InTurns):
    """The policy calls tools, and sees what they answer; what it says last is judged."""

    kind: Literal["tools"]
    tools: Annotated[tuple[ToolName, ...], BeforeValidator(tuple_from_list), Field(min_length=1)]
    """calc, python, or `package.module:function` (argument: str) → str, which is called by the function's name."""
    format: Literal["hermes", "plain"] = "hermes"
    """How a call is written, see `slimerl/rollout/agents/formats.py`. hermes: JSON in tags, announced and answered as
    the tokenizer's chat template does it. plain: `calc(1+2)=`."""
    output_characters: Positive = 2000
    """Of a tool's answer; the middle of a longer one is left out."""
    python_cpu_s: Positive = 4
    """CPU seconds that one program may take; more is a failure of the program, which the policy is told."""
    python_wall_s: Seconds = 15.0
    """The same by the clock."""
    python_memory_mib: Positive = 512
    python_processes: Positive = 4
    """Processes and threads of a program, at one time."""

    @model_validator(mode="after")
    def _tools_fit_together(self) -> "ToolsAgent":
        names = [tool.rpartition(":")[2] for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError(f"two of the tools {', '.join(self.tools)} are called by one name; rename a function")
        if "python" in self.tools and self.timeout_s <= self.python_wall_s:
            raise ValueError(
                f"timeout_s = {self.timeout_s:g} must exceed python_wall_s = {self.python_wall_s:g}: a program that "
                "hangs is the policy's, but a worker that is killed drops the sample"
            )
        return self


class EnvironmentAgent(_InTurns):
    """The policy acts on an environment, which gives the reward; `reward` is not asked."""

    kind: Literal["environment"]
    environment: EnvironmentName
    """reasoning_gym, verifiers, or `package.module:function`, which makes an environment from `options`; see
    `slimerl/environments/environment.py`."""
    options: dict[str, Any] = Field(default_factory=dict)
    episodes_per_call: Positive = 64
    """Episodes that wait at the same time are stepped together, so many at most; `timeout_s` is for them all."""
    reward: Literal["final", "sum"] = "final"
    """Of an episode: that of its last step, or of all."""


class FunctionAgent(AnyAgent):
    """An agent loop of the user's."""

    kind: Literal["function"]
    function: ImportPath
    """`package.module:function`, async (policy, sample, prompt, texts); see `slimerl/rollout/agents/loop.py`."""


class ExternalAgent(AnyAgent):
    """A program outside of the run makes the samples: it takes tasks from a gateway, talks to the policy there as to
    any OpenAI or SGLang server, and ends them. See `slimerl/rollout/gateway/front.py`."""

    kind: Literal["external"]
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of the gateway (of the first, where rollout.processes says there are several), at the address that
    cluster.network says; 0 takes a free one. RUN_DIR/gateway.json has it."""
    silent_s: Seconds = 600.0
    """A task whose program has not been heard of for so long is dropped."""
    branch: Literal["finished", "longest", "all"] = "finished"
    """What is trained of a session in which the program edited what was said, or asked twice: the branch that had the
    last reply, the one with the most tokens, or all, as further samples of the group with the same reward; what they
    have in common is trained once."""


def _variant_of(given: Any) -> str:
    kind = given.get("kind", DEFAULT_KIND) if isinstance(given, dict) else getattr(given, "kind", DEFAULT_KIND)
    return f"<{kind}>"


AgentSpec = Annotated[
    Annotated[SingleTurnAgent, Tag("<single_turn>")]
    | Annotated[ToolsAgent, Tag("<tools>")]
    | Annotated[EnvironmentAgent, Tag("<environment>")]
    | Annotated[FunctionAgent, Tag("<function>")]
    | Annotated[ExternalAgent, Tag("<external>")],
    Discriminator(_variant_of),
]

KINDS: tuple[type[AnyAgent], ...] = (SingleTurnAgent, ToolsAgent, EnvironmentAgent, FunctionAgent, ExternalAgent)


def kind_of(model: type[AnyAgent]) -> str:
    (kind,) = get_args(model.model_fields["kind"].annotation)
    return kind


def check_agent(agent: AnyAgent, samples_responses: bool, chat_template: bool) -> None:
    """Raises ValueError: it does not fit the rest of the spec."""
    if not samples_responses and not isinstance(agent, SingleTurnAgent):
        raise ValueError(
            f"agent.kind {kind_of(type(agent))} continues responses, and the algorithm samples none; drop the section "
            "agent"
        )
    if isinstance(agent, ToolsAgent) and agent.format == "hermes" and not chat_template:
        raise ValueError(
            "agent.format hermes takes the form of tools' messages from the chat template: set data.chat_template: "
            "true, or agent.format: plain"
        )
