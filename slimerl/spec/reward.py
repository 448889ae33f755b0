"""The `reward` section: what judges a response, one variant of the section for each `kind`.

Flows in: the section's keys. Flows out: a `RewardSpec`.
Invariant: a variant has the keys that its kind reads and no others; a key of another kind is refused with its name.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from slimerl.spec.fields import FilePath, Positive, Real, Seconds, Strict, Workers, tuple_from_list
from slimerl.spec.functions import ImportPath

DEFAULT_KIND = "math"

Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


class AnyReward(Strict):
    """What all kinds have in common."""

    on_failure: Literal["drop", "zero"] = "drop"
    """When the judging fails, which says nothing about the response: drop the sample, or give 0. As part of a
    composite: fail the whole, or add 0."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_read(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            others = [each for each in _kinds() if key in each.model_fields]
            if key not in cls.model_fields and others:
                names = " and ".join(kind_of(each) for each in others)
                raise ValueError(f"kind {kind_of(cls)} does not read '{key}', which belongs to {names}; drop it")
        return given


class _InWorkers(AnyReward):
    """Judged in processes of this machine, each of which can be killed."""

    workers: Workers = 1
    timeout_s: Seconds = 10.0
    """For one response; a worker that takes longer is killed and replaced, and the judging has failed."""


class MathReward(_InWorkers):
    """The response's last expression against the row's answer, by math-verify."""

    kind: Literal["math"] = "math"


class CodeReward(_InWorkers):
    """The response's last block of Python against the row's tests, in a sandbox. See `slimerl/rewards/code.py`."""

    kind: Literal["code"]
    timeout_s: Seconds = 120.0
    test_cpu_s: Positive = 4
    """CPU seconds that one test may take; more is a wrong answer."""
    test_wall_s: Seconds = 15.0
    """The same by the clock: it also counts sleeping, and waiting for a busy machine."""
    memory_mib: Positive = 512
    """Address space of each process of a program."""
    processes: Positive = 4
    """Processes and threads of a program, at one time."""
    output_mib: Positive = 1
    """What a program may print in one test."""
    files_mib: Positive = 16
    """What it may write into its directory, which is empty at the start of each test."""
    partial_credit: bool = False
    """The reward is the fraction of passed tests, and not 1 for all of them, else 0."""

    @model_validator(mode="after")
    def _a_test_ends_before_its_worker(self) -> "CodeReward":
        if self.timeout_s <= self.test_wall_s:
            raise ValueError(
                f"timeout_s = {self.timeout_s:g} must exceed test_wall_s = {self.test_wall_s:g}: a response that "
                "hangs is wrong, but a worker that is killed has failed"
            )
        return self


class FunctionReward(_InWorkers):
    """A function of the user's."""

    kind: Literal["function"]
    function: ImportPath
    """`package.module:function`, (request: slimerl.rewards.outcome.RewardRequest) → an `Outcome`, True or False."""


class ModelReward(_InWorkers):
    """The score of a reward model (`algorithm.name: reward_model` trains one), in worker processes on the CPU."""

    kind: Literal["model"]
    path: FilePath
    """Hugging Face checkpoint with a scalar head and the policy's tokenizer."""
    timeout_s: Seconds = 60.0
    correct_from: Real = 0.0
    """A response counts as correct whose score is above this."""


class _Remote(AnyReward):
    """Judged over HTTP."""

    url: Url
    timeout_s: Seconds = 60.0
    """For one response, all tries together."""
    concurrency: Positive = 32
    """Requests under way at one time."""
    token_variable: VariableName | None = None
    """Environment variable with the bearer token, so that it stands in no file of the run."""


class HttpReward(_Remote):
    """A service of the user's. The exchange is described in `slimerl/rewards/http.py`."""

    kind: Literal["http"]


class ServedModelReward(_Remote):
    """The same from an SGLang server with that model (`sglang.launch_server --is-embedding`)."""

    kind: Literal["served_model"]
    correct_from: Real = 0.0


class JudgeReward(_Remote):
    """A language model grades the response by a rubric: any server of the OpenAI chat protocol, SGLang among them."""

    kind: Literal["judge"]
    model: str = "default"
    """As the server calls it."""
    rubric_path: FilePath
    """A text with {prompt}, {response} and, where the judge is to know it, {answer}."""
    grades: dict[str, Real] = Field(
        default_factory=lambda: {"correct": 1.0, "incorrect": 0.0}, min_length=2, max_length=20
    )
    """What the judge chooses from, with the reward of each; every vote sees them in another order."""
    correct_from: Real = 0.5
    """A response is correct whose mean grade is above this."""
    votes: Positive = 3
    """The reward is their mean; it fails when fewer than half of them can be read."""
    temperature: Annotated[Real, Field(ge=0)] = 0.6
    max_new_tokens: Positive = 2048
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, as the server knows them: `{chat_template_kwargs: {enable_thinking: false}}`."""


def variant(kind: str) -> str:
    """How a kind is told apart from a key in the place of an error."""
    return f"<{kind}>"


def _variant_of(given: Any) -> str:
    kind = given.get("kind", DEFAULT_KIND) if isinstance(given, dict) else getattr(given, "kind", DEFAULT_KIND)
    return variant(str(kind))


SingleReward = Annotated[
    Annotated[MathReward, Tag("<math>")]
    | Annotated[CodeReward, Tag("<code>")]
    | Annotated[FunctionReward, Tag("<function>")]
    | Annotated[HttpReward, Tag("<http>")]
    | Annotated[ModelReward, Tag("<model>")]
    | Annotated[ServedModelReward, Tag("<served_model>")]
    | Annotated[JudgeReward, Tag("<judge>")],
    Discriminator(_variant_of),
]


class RewardPart(Strict):
    weight: Real
    reward: SingleReward


class CompositeReward(AnyReward):
    """The weighted sum of others. The first says whether a response is correct; the rest shapes the reward."""

    kind: Literal["composite"]
    parts: Annotated[tuple[RewardPart, ...], BeforeValidator(tuple_from_list), Field(min_length=2)]

    @model_validator(mode="after")
    def _first_part_decides(self) -> "CompositeReward":
        if self.parts[0].reward.on_failure != "drop":
            raise ValueError(
                "the first of the parts says whether a response is correct, so that without it there is no reward; "
                "set on_failure of the composite instead of the part's"
            )
        return self


RewardSpec = Annotated[
    Annotated[MathReward, Tag("<math>")]
    | Annotated[CodeReward, Tag("<code>")]
    | Annotated[FunctionReward, Tag("<function>")]
    | Annotated[HttpReward, Tag("<http>")]
    | Annotated[ModelReward, Tag("<model>")]
    | Annotated[ServedModelReward, Tag("<served_model>")]
    | Annotated[JudgeReward, Tag("<judge>")]
    | Annotated[CompositeReward, Tag("<composite>")],
    Discriminator(_variant_of),
]


def kind_of(model: type[AnyReward]) -> str:
    (kind,) = get_args(model.model_fields["kind"].annotation)
    return kind


def single_rewards(reward: AnyReward) -> Iterator[tuple[str, AnyReward]]:
    """The reward itself, or the parts of a composite; each with its place in the spec."""
    if isinstance(reward, CompositeReward):
        for number, part in enumerate(reward.parts):
            yield f"reward.parts.{number}.reward", part.reward
    else:
        yield "reward", reward


def _kinds() -> tuple[type[AnyReward], ...]:
    return (
        *(MathReward, CodeReward, FunctionReward, HttpReward),
        *(ModelReward, ServedModelReward, JudgeReward, CompositeReward),
    )
