"""Models with a scalar head against the policy: the critic's checkpoint, and that of a reward model.

Flows in: the spec. Flows out: one line per fault, beginning with the key. Reads headers alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimerl.resharding.families import ConfigError, family_of
from slimerl.resharding.families.family import stored_form
from slimerl.resharding.families.score import SCORE
from slimerl.resharding.hf_checkpoint import CheckpointError, HfCheckpoint, check_keys
from slimerl.spec import RunSpec
from slimerl.training.checkpoint import directory
from slimerl.training.model_config import UnsupportedModel, check_divisible, model_arguments, read_config

_TOKENIZER = "tokenizer.json"


def critic_faults(spec: RunSpec) -> Iterator[str]:
    """Of `training.critic`; the checkpoint may be the policy's own, which is checked as such."""
    path, optimizer = spec.critic_path, spec.critic_optimizer
    if path is None:
        return
    if optimizer.warmup_steps > spec.training.steps:
        yield (
            f"training.critic.optimizer.warmup_steps = {optimizer.warmup_steps} exceeds training.steps = "
            f"{spec.training.steps}; lower it"
        )
    if optimizer.min_lr > optimizer.lr:
        yield (
            f"training.critic.optimizer.min_lr = {optimizer.min_lr:g} exceeds training.critic.optimizer.lr = "
            f"{optimizer.lr:g}; lower it"
        )
    if path != spec.model.path:
        yield from (f"training.critic.{fault}" for fault in _faults(spec, path, scored=False))


def critic_config(spec: RunSpec) -> dict[str, Any] | None:
    """The `config.json` of a critic that is another model than the policy; None: there is none, or none that can be
    read."""
    path = spec.critic_path
    if path is None or path == spec.model.path:
        return None
    try:
        return read_config(path)
    except UnsupportedModel:
        return None


def reward_model_faults(spec: RunSpec, path: Path) -> Iterator[str]:
    """Each begins with the key within the reward."""
    yield from _faults(spec, path, scored=True)


def _faults(spec: RunSpec, path: Path, scored: bool) -> Iterator[str]:
    """`scored`: there must be a scalar head."""
    try:
        config = read_config(path)
        arguments = model_arguments(config)
        family = family_of(config)
        with HfCheckpoint(path) as tensors:
            if scored and SCORE not in tensors:
                yield (
                    f"path: {path} is no reward model (it has no {SCORE}); train one with algorithm.name: reward_model"
                )
                return
            form = stored_form(tensors)
            wanted = family.logical_tensors(config, form=form)
            check_keys(tensors, wanted, family.aliases(config, form), family.unused_tensors(config, form))
        if not scored:
            check_divisible(arguments, spec.training.parallel)
    except (CheckpointError, ConfigError, UnsupportedModel) as error:
        yield f"path: {path}: {error}"
        return
    files = [each / _TOKENIZER for each in (path, spec.model.path)]
    digests = {directory.entry_of(file).digest if file.is_file() else "" for file in files}
    if len(digests) > 1:
        yield (
            f"path: {path} has another {_TOKENIZER} than model.path {spec.model.path}, whose tokens it is given; take "
            "a model that was made with this tokenizer"
        )
