"""The teacher of on-policy distillation: another checkpoint of the same architecture, whose log-probabilities of the
policy's samples the trainer computes itself.

Flows in: the wrapped chunks of the policy, the teacher's checkpoint. Flows out: a `ReferenceModel` that holds the
teacher's weights and never changes; its turns, its memory and its invariants are those of the reference model.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from slimerl.training.model_config import UnsupportedModel, model_arguments, read_config
from slimerl.training.reference import ReferenceModel
from slimerl.training.weights import ModelMap, load_weights


def load_teacher(
    path: Path, policy_path: Path, chunks: Sequence[torch.nn.Module], where: ModelMap, rank: int
) -> ReferenceModel:
    """Called on every rank.

    Raises:
        UnsupportedModel: it is of another architecture than the policy.
        CheckpointError: its tensors are not those of its `config.json`.
    """
    if model_arguments(read_config(path)) != model_arguments(read_config(policy_path)):
        raise UnsupportedModel(
            f"algorithm.teacher_path {path} is of another architecture or vocabulary than model.path {policy_path}; "
            "the teacher takes turns in the policy's place: choose a checkpoint of the same config.json"
        )
    teacher = ReferenceModel(chunks)
    with teacher.turn():
        load_weights(chunks, path, where, rank)
    return teacher
