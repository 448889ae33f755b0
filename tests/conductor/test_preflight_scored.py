"""Critics, reward models and pairs that cannot work are refused before anything starts."""

import json
import shutil

import pytest
import torch
from preflight_home import ROW, change, check, write_rows
from safetensors.torch import load_file, save_file

PAIR = {"id": "a", "prompt": "1+1=", "chosen": "2", "rejected": "3"}
PPO, REWARD_MODEL = ["algorithm={name: ppo}"], ["algorithm={name: reward_model}", "data.eval_path=null"]


def scored(home, name="scored"):
    """The model with a scalar head, as an export is."""
    shutil.copytree(home / "model", home / name)
    tensors = load_file(home / name / "model.safetensors")
    hidden = tensors["model.norm.weight"].shape[0]
    save_file(tensors | {"score.weight": torch.zeros(1, hidden)}, home / name / "model.safetensors", {"format": "pt"})
    change(home / name / "config.json", architectures=["Qwen3ForSequenceClassification"], id2label={"0": "LABEL_0"})


def other_tokenizer(home):
    scored(home)
    change(home / "scored" / "tokenizer.json", version="1.0 ")


def nothing(home):
    """The fault is in the overrides."""


CASES = {
    "critic without PPO": (
        ["training.critic={}"],
        nothing,
        "spec.yaml: training.critic is not read by grpo, which has no critic; drop it",
    ),
    "warm-up without end": (
        ["algorithm={name: ppo, value_warmup_steps: 2}"],
        nothing,
        "spec.yaml: algorithm.value_warmup_steps = 2 leaves no step of training.steps = 2 to the policy; lower the one "
        "or raise the other",
    ),
    "critic that is not there": (
        [*PPO, "training.critic={path: nowhere}"],
        nothing,
        "training.critic.path: nowhere: there is no directory nowhere",
    ),
    "critic that would decay upwards": (
        [*PPO, "training.critic={optimizer: {lr: 0.1, min_lr: 1}}"],
        nothing,
        "training.critic.optimizer.min_lr = 1 exceeds training.critic.optimizer.lr = 0.1; lower it",
    ),
    "critic of other tokens": (
        [*PPO, "training.critic={path: scored}"],
        other_tokenizer,
        "training.critic.path: scored has another tokenizer.json than model.path model, whose tokens it is given",
    ),
    "reward by a language model": (
        ["reward={kind: model, path: model}"],
        nothing,
        "reward.path: model is no reward model (it has no score.weight); train one with algorithm.name: reward_model",
    ),
    "a policy with a scalar head": (
        ["model.path=scored"],
        scored,
        "model.path: checkpoint scored has score.weight, which its config.json does not ask for",
    ),
    "half a pair": (
        REWARD_MODEL,
        lambda home: write_rows(home, {key: value for key, value in PAIR.items() if key != "rejected"}),
        "train.jsonl:1: 'rejected' is missing",
    ),
    "no pair": (
        REWARD_MODEL,
        lambda home: write_rows(home, PAIR | {"rejected": "2"}),
        "train.jsonl: id 'a': chosen and rejected are the same",
    ),
    "reward model from a distributed checkpoint": (
        [*REWARD_MODEL, "model.megatron_path=somewhere"],
        nothing,
        "spec.yaml: model.megatron_path: a reward model takes its weights from a Hugging Face checkpoint; leave the "
        "key out",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_s3_what_cannot_work_is_one_clear_line(home, case):
    """Injected: the fault that the case is named after."""
    overrides, prepare, expected = CASES[case]
    prepare(home)
    code, lines = check(home, *overrides)
    assert code == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith(expected)


@pytest.mark.parametrize(
    "overrides",
    [
        PPO,
        [*PPO, "training.critic={path: scored, optimizer: {lr: 1.0e-5}}", "reward={kind: model, path: scored}"],
        REWARD_MODEL,
        [*REWARD_MODEL, "model.path=scored"],
        ["algorithm={name: dpo}", "data.eval_path=held.jsonl"],
        ["algorithm={name: dpo}", "engine.model_path=nowhere"],
    ],
)
def test_what_can_work_passes(home, overrides):
    scored(home)
    row = ROW | PAIR
    write_rows(home, row, row | {"id": "b"})
    (home / "held.jsonl").write_text(json.dumps(row) + "\n")
    assert check(home, "training.prompts_per_step=2", *overrides) == (0, [])
