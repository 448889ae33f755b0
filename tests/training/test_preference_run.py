"""Runs on preference data from their specs: they learn, and what they export is a reward, or a policy."""

import asyncio
import json

import pytest
from safetensors.torch import load_file
from tiny_models import make_tiny_model

from slimerl.rewards.build import build_reward
from slimerl.rewards.outcome import RewardRequest
from slimerl.spec.load import spec_from_tree
from slimerl.spec.reward import ModelReward
from slimerl.telemetry.run_log import read_records


def run(spec) -> None:
    import megatron_patches

    megatron_patches.apply()
    from slimerl.training.__main__ import run_rank

    run_rank(spec)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("model"), tied=True)


def write_pairs(path, numbers):
    """The polite answer is preferred, whatever its length."""
    rows = [
        {"id": each, "prompt": f"{each}?", "chosen": f"{each % 7} please", "rejected": "no" * (1 + each % 5)}
        for each in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained(ranks, tmp_path, model, name):
    """(the spec, its records) of a run on two ranks."""
    write_pairs(tmp_path / "train.jsonl", range(24))
    write_pairs(tmp_path / "held.jsonl", range(100, 110))
    tree = {
        "name": name,
        "output_dir": str(tmp_path / "run"),
        "model": {"path": str(model)},
        "data": {"train_path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "held.jsonl")},
        "algorithm": {"name": name},
        "training": {
            "steps": 8,
            "prompts_per_step": 8,
            "minibatches_per_step": 2,
            "micro_batch_tokens": 64,
            "parallel": {"data": 2},
            "optimizer": {"lr": 3e-3},
        },
        "checkpoint": {"every_steps": 4},
    }
    spec = spec_from_tree(tree, "test")
    ranks.run(2, run, spec)
    return spec, read_records(spec.run_dir / "metrics.jsonl")


def test_a_reward_model_learns_what_is_preferred_and_judges_others_answers(ranks, tmp_path, model):
    spec, records = trained(ranks, tmp_path, model, "reward_model")
    assert records[0]["eval/accuracy"] == 0.0, "scores are equal before the first step: none leads"
    assert records[0]["eval/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert records[-1]["eval/accuracy"] == pytest.approx(1.0)
    assert records[-1]["eval/margin"] > 0
    assert sorted(path.name for path in (spec.run_dir / "checkpoints").iterdir()) == ["step-4", "step-8"]

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec.export_dir)

    def request(text):
        return RewardRequest(text, text, "", tokens=(*tokenizer(text)["input_ids"], tokenizer.eos_token_id))

    async def judged():
        reward = build_reward(ModelReward(kind="model", path=spec.export_dir))
        await reward.start()
        try:
            return [(await reward.score(request(text))).reward for text in ("200?4 please", "200?nono")]
        finally:
            await reward.close()

    polite, rude = asyncio.run(judged())
    assert polite > rude


def test_dpo_moves_the_policy_towards_what_is_preferred(ranks, tmp_path, model):
    spec, records = trained(ranks, tmp_path, model, "dpo")
    assert records[0]["eval/margin"] == 0.0
    assert records[-1]["eval/accuracy"] == pytest.approx(1.0)
    assert records[-1]["eval/loss"] < records[0]["eval/loss"]
    exported, given = (load_file(path / "model.safetensors") for path in (spec.export_dir, model))
    assert exported.keys() == given.keys()
