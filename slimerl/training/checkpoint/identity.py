"""What makes a run the same run when it goes on from a checkpoint. Pure files, no Megatron.

Flows in: the spec and the files that it names. Flows out: one value for each key that must not change, kept in the
manifest of every checkpoint. Invariant: a changed value makes samples, rewards or gradients other ones than those of
the run that wrote the checkpoint, or would be ignored; what changes speed, place or patience alone is not in here.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from slimerl.spec import RunSpec
from slimerl.spec.reward import AnyReward, CompositeReward, JudgeReward, ModelReward, single_rewards
from slimerl.training.checkpoint import directory

_OPTIMIZER_MAY_CHANGE = {"clip_grad_norm"}
"""Read from the spec at every update. All else comes from the checkpoint with Adam's state or is a part of the
schedule: a changed value would be ignored."""
_ALGORITHM_MAY_CHANGE = {"dynamic_sampling_rounds"}
"""How long the search for a usable group may last; what a group is used for stays the same."""
_REWARD_MAY_CHANGE = {"workers", "timeout_s", "url", "concurrency", "token_variable"}
"""Where and how fast is judged, not how: a service may have moved."""
_AGENT_MAY_CHANGE = {"workers", "timeout_s", "episodes_per_call", "python_wall_s", "port", "silent_s"}
"""Where and how fast, and for how long something is waited for."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
"""What transformers reads a tokenizer from, where it is there; the last has ids that end a response."""
_ABSENT = "no file"
_UNREAD = "not read"

_SAMPLED_BLOCKS = 256
"""Of all weight files together, each file has one at least."""
_BLOCK_BYTES = 4096


def identity(spec: RunSpec) -> dict[str, Any]:
    """Keys of the spec, and digests of its files, without which a run that goes on would be another one.

    To be asked for once, when a run starts: later the files may be others than those that it reads.
    """
    optimizer = spec.training.optimizer.model_dump(exclude=_OPTIMIZER_MAY_CHANGE)
    algorithm = {key: value for key, value in _dumped(spec.algorithm).items() if key not in _ALGORITHM_MAY_CHANGE}
    return {
        "seed": spec.seed,
        "model.dtype": spec.model.dtype,
        directory.CONFIG_IDENTITY: directory.entry_of(spec.model.path / "config.json").digest,
        **_tokenizer(spec.model.path),
        "training.prompts_per_step": spec.training.prompts_per_step,
        "training.minibatches_per_step": spec.training.minibatches_per_step,
        "rollout.samples_per_prompt": spec.rollout.samples_per_prompt if spec.uses_engines else 1,
        "digest of data.train_path": directory.entry_of(spec.data.train_path).digest,
        "data.chat_template": spec.data.chat_template,
        "data.system_prompt": spec.data.system_prompt,
        "data.max_prompt_tokens": spec.data.max_prompt_tokens,
        **{f"algorithm.{key}": value for key, value in algorithm.items()},
        **{f"training.optimizer.{key}": value for key, value in optimizer.items()},
        **(_sampling(spec) if spec.uses_engines else {}),
        **(_critic(spec) if spec.algorithm.has_critic else {}),
        **(_reference(spec) if spec.algorithm.has_reference_model else {}),
    }


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, by its key. A key that the checkpoint does not have is not compared."""
    return [f"{key} was {then[key]}, is {now[key]}" for key in now if key in then and then[key] != now[key]]


def _dumped(part: Any) -> dict[str, Any]:
    """As it will be read back from a manifest."""
    return part.model_dump(mode="json")


def _digest_or_absent(path: Path) -> str:
    return directory.entry_of(path).digest if path.is_file() else _ABSENT


def _tokenizer(model_path: Path) -> dict[str, str]:
    return {f"digest of model.path's {name}": _digest_or_absent(model_path / name) for name in _TOKENIZER_FILES}


def _sampling(spec: RunSpec) -> dict[str, Any]:
    """What is sampled from, and how it is judged."""
    values: dict[str, Any] = {"rollout.temperature": spec.rollout.temperature, "reward.kind": _kind(spec.reward)}
    agent = _dumped(spec.agent)
    values |= {f"agent.{key}": value for key, value in agent.items() if key not in _AGENT_MAY_CHANGE}
    if isinstance(spec.reward, CompositeReward):
        values["reward.on_failure"] = spec.reward.on_failure
        values["weights of reward.parts"] = [part.weight for part in spec.reward.parts]
    for where, reward in single_rewards(spec.reward):
        kept = {key: value for key, value in _dumped(reward).items() if key not in _REWARD_MAY_CHANGE}
        if isinstance(reward, JudgeReward):
            del kept["rubric_path"]
            values[f"digest of {where}.rubric_path"] = _digest_or_absent(reward.rubric_path)
        if isinstance(reward, ModelReward):
            del kept["path"]
            values[f"sampled digest of {where}.path's weights"] = weights_digest(reward.path)
        values |= {f"{where}.{key}": value for key, value in kept.items()}
    return values


def _kind(reward: AnyReward) -> str:
    return str(_dumped(reward)["kind"])


def _critic(spec: RunSpec) -> dict[str, Any]:
    optimizer = spec.critic_optimizer.model_dump(exclude=_OPTIMIZER_MAY_CHANGE)
    return {f"training.critic.optimizer.{key}": value for key, value in optimizer.items()}


def _reference(spec: RunSpec) -> dict[str, Any]:
    """Of the weights that the reference model is made of at every start: a checkpoint of the run has the policy's."""
    path = spec.model.megatron_path
    # both, so that weights of the one kind in place of the other are a change
    return {
        "digest of model.megatron_path": _ABSENT if path is None else _digest_or_absent(path / directory.MANIFEST),
        "sampled digest of model.path's weights": weights_digest(spec.model.path) if path is None else _UNREAD,
    }


def weights_digest(model_path: Path) -> str:
    """Of the weight files' names, sizes and headers, and of blocks that are spread evenly over each, ends included.

    Other weights differ in nearly every element, and so in every block. It misses a change that lies between the
    blocks: a few elements edited by hand, or one tensor of thousands.
    """
    digest = xxhash.xxh3_128()
    files = sorted(model_path.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {size} ".encode())
            file.seek(0)
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, size)))
            first, last = file.tell(), max(file.tell(), size - _BLOCK_BYTES)
            blocks = max(2, _SAMPLED_BLOCKS // len(files))
            for block in range(blocks):
                file.seek(first + (last - first) * block // (blocks - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
