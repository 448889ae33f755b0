"""From the `reward` section of a spec to what judges.

Flows in: a `RewardSpec`. Flows out: a `RunningReward`, not yet started.
"""

from slimerl.rewards.composite import Part, WeightedSum
from slimerl.rewards.http import HttpScorer
from slimerl.rewards.language_judge import CHAT_PATH, LanguageJudge
from slimerl.rewards.not_asked import NotAsked
from slimerl.rewards.outcome import RewardUnavailable, RunningReward
from slimerl.rewards.pool import MATH, MEMORY_BYTES, WorkerPool
from slimerl.rewards.remote import Remote
from slimerl.rewards.reward_model import CLASSIFY_PATH, ServedModel
from slimerl.spec import RunSpec
from slimerl.spec.agent import EnvironmentAgent
from slimerl.spec.reward import (
    AnyReward,
    CodeReward,
    CompositeReward,
    FunctionReward,
    HttpReward,
    JudgeReward,
    MathReward,
    ModelReward,
    ServedModelReward,
    single_rewards,
)

_MIB = 2**20
_CODE = "slimerl.rewards.code:scorer"
_FUNCTION = "slimerl.rewards.hooks:scorer"
_MODEL = "slimerl.rewards.reward_model:scorer"


def build_reward(spec: AnyReward) -> RunningReward:
    """Raises RewardUnavailable: a file that the reward needs cannot be read."""
    match spec:
        case CompositeReward():
            parts = [Part(part.weight, build_reward(part.reward), part.reward.on_failure) for part in spec.parts]
            return WeightedSum(parts)
        case MathReward():
            return WorkerPool(spec.workers, spec.timeout_s, MATH)
        case FunctionReward():
            return WorkerPool(spec.workers, spec.timeout_s, _FUNCTION, options={"function": spec.function})
        case CodeReward():
            return WorkerPool(spec.workers, spec.timeout_s, _CODE, options=_limits(spec), starts_programs=True)
        case HttpReward():
            return HttpScorer(_remote(spec, spec.url))
        case ModelReward():
            options = {"path": str(spec.path), "correct_from": spec.correct_from}
            return WorkerPool(spec.workers, spec.timeout_s, _MODEL, _model_memory(spec), options=options)
        case ServedModelReward():
            return ServedModel(_remote(spec, spec.url.rstrip("/") + CLASSIFY_PATH), spec.correct_from)
        case JudgeReward():
            return _judge(spec)
    raise AssertionError(f"no reward of kind {spec}")


def reward_of_run(spec: RunSpec) -> RunningReward:
    """What judges the samples of a run. Raises RewardUnavailable."""
    return NotAsked() if isinstance(spec.agent, EnvironmentAgent) else build_reward(spec.reward)


def reads_prompt(spec: AnyReward) -> bool:
    """Does it look at `RewardRequest.prompt`? Decoding it costs as much as decoding the response."""
    kinds = (FunctionReward, HttpReward, JudgeReward)
    return any(isinstance(reward, kinds) for _, reward in single_rewards(spec))


def reads_tokens(spec: AnyReward) -> bool:
    """Does it look at `RewardRequest.tokens`?"""
    return any(isinstance(reward, ModelReward | ServedModelReward) for _, reward in single_rewards(spec))


def _model_memory(spec: ModelReward) -> int:
    """Address space: that of torch and what a pass takes, the weights in memory, and their files, which are mapped."""
    return 2 * MEMORY_BYTES + 2 * sum(file.stat().st_size for file in spec.path.glob("*.safetensors"))


def _limits(spec: CodeReward) -> dict[str, int | float | bool]:
    return {
        "cpu_s": spec.test_cpu_s,
        "wall_s": spec.test_wall_s,
        "memory_bytes": spec.memory_mib * _MIB,
        "processes": spec.processes,
        "output_bytes": spec.output_mib * _MIB,
        "files_bytes": spec.files_mib * _MIB,
        "partial_credit": spec.partial_credit,
    }


def _remote(spec: HttpReward | ServedModelReward | JudgeReward, url: str) -> Remote:
    return Remote(url, spec.timeout_s, spec.concurrency, spec.token_variable)


def _judge(spec: JudgeReward) -> LanguageJudge:
    try:
        rubric = spec.rubric_path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RewardUnavailable(f"reward.rubric_path: {spec.rubric_path} cannot be read: {error}") from error
    return LanguageJudge(
        remote=_remote(spec, spec.url.rstrip("/") + CHAT_PATH),
        rubric=rubric,
        model=spec.model,
        grades=spec.grades,
        correct_from=spec.correct_from,
        votes=spec.votes,
        temperature=spec.temperature,
        max_new_tokens=spec.max_new_tokens,
        extra_body=spec.extra_body,
    )
