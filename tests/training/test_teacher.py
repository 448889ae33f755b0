"""The teacher of distillation answers as its checkpoint does, while the policy learns in its place."""

from pathlib import Path

import pytest
import tiny
import torch

from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec
from slimerl.training.model_config import UnsupportedModel
from slimerl.training.needs import unsupplied
from slimerl.training.teacher import load_teacher

OPTIMIZER = OptimizerSpec(lr=1e-2)
STEPS = 3


def teach(model: Path, teacher: Path, parallel: ParallelSpec):
    """(the teacher's answers in each step, those of a model of its own, figures of each step), for the same samples."""
    grid = tiny.start(parallel)
    algorithm = AlgorithmSpec(name="distillation", teacher_path=teacher)
    alone = tiny.trainer(tiny.build(teacher, parallel, grid=grid), AlgorithmSpec(), OPTIMIZER, steps=STEPS)
    built = tiny.build(model, parallel, grid=grid)
    trainer = tiny.trainer(built, algorithm, OPTIMIZER, steps=STEPS)
    trainer.teacher = load_teacher(teacher, model, trainer.chunks, built.map, grid.rank)
    packs = tiny.micro_batches(tiny.random_step(0), built, budget=60)
    heard, figures = [], []
    for _ in range(STEPS):
        heard.append([each.teacher_logprobs for each in trainer._with_logprobs(packs)[0]])
        figures.append(trainer.step(packs))
    return heard, alone.logprobs(packs[0]), figures


def test_it_answers_as_its_checkpoint_does_while_the_policy_learns(ranks, tmp_path):
    model, teacher = tmp_path / "model", tmp_path / "teacher"
    other = tiny.write_model(model, "qwen3")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.save_pretrained(teacher)
    *_, last = ranks.run(2, teach, model, teacher, ParallelSpec(tensor=2))
    heard, alone, figures = last
    assert alone
    assert all(torch.equal(*pair) for answers in heard for pair in zip(answers, alone, strict=True))
    assert len({each["train/teacher_kl"] for each in figures}) == STEPS, "the policy moves"


def test_a_teacher_of_another_architecture_is_refused_by_name(tmp_path):
    tiny.write_model(tmp_path / "model", "qwen3")
    tiny.write_model(tmp_path / "teacher", "qwen3", num_hidden_layers=2)
    with pytest.raises(UnsupportedModel, match=r"algorithm\.teacher_path .*teacher is of another architecture"):
        load_teacher(tmp_path / "teacher", tmp_path / "model", [], None, 0)


def test_without_a_teacher_it_is_refused_before_the_run():
    assert unsupplied(AlgorithmSpec(name="distillation", teacher_path="somewhere")) == []
    assert "set algorithm.teacher_path" in unsupplied(AlgorithmSpec(name="distillation"))[0]
