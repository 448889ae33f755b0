"""Training in bfloat16 keeps float32 main weights and follows float32 training."""

from pathlib import Path

import pytest
import tiny
import torch

from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec

COUNT = 30
STEPS = [tiny.random_step(seed) for seed in range(3)]


def train(model_path: Path, parallel: ParallelSpec, dtype: str):
    built = tiny.build(model_path, parallel, dtype)
    # updates far below bfloat16's resolution of the weights: without main weights nothing would move
    trainer = tiny.trainer(built, AlgorithmSpec(name="sft"), OptimizerSpec(lr=3e-5), steps=COUNT)
    losses = [trainer.step(tiny.micro_batches(STEPS[index % 3], built, 60))["train/loss"] for index in range(COUNT)]
    return losses, tiny.collected(built)


def test_bfloat16_follows_float32_on_two_ranks(ranks, tmp_path):
    tiny.write_model(tmp_path, "qwen3")
    [(exact, _)] = ranks.run(1, train, tmp_path, ParallelSpec(), "fp32")
    (losses, weights), (_, of_other) = ranks.run(2, train, tmp_path, ParallelSpec(data=2), "bf16")
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert all(torch.equal(weights[name], of_other[name]) for name in weights)
    # weights are read in bfloat16, which follows the main weights in steps
    assert losses[0] == pytest.approx(exact[0], abs=0.01)
    assert exact[-1] < exact[0] - 0.05
    assert losses[-1] - losses[0] == pytest.approx(exact[-1] - exact[0], rel=0.3)
