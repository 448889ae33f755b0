"""What must be as it was for a run to go on from its checkpoint: changed files and keys are named, all else is free."""

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from slimerl.spec.load import spec_from_tree
from slimerl.training.checkpoint.identity import changes, identity

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@pytest.fixture
def home(tmp_path):
    """A model directory with weights in two files, and data."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for name in TOKENIZER[:2]:
        (model / name).write_text("{}")
    for number in (1, 2):
        save_file({"weight": torch.arange(300_000.0) + number}, model / f"model-{number}.safetensors")
    (tmp_path / "rows.jsonl").write_text("rows")
    (tmp_path / "rubric.txt").write_text("{prompt} {response}")
    return tmp_path


TREE = {
    "name": "same",
    "algorithm": {"name": "grpo", "kl_coef": 0.1},
    "training": {"steps": 2, "prompts_per_step": 4},
}


def paths(home):
    data = {"train_path": str(home / "rows.jsonl"), "chat_template": True}
    return {"model": {"path": str(home / "model")}, "data": data}


def spec(home, **sections):
    tree = TREE | paths(home)
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return spec_from_tree(tree, "test")


def kept(home, **sections):
    """As the manifest of a checkpoint gives it back."""
    return msgspec.json.decode(msgspec.json.encode(identity(spec(home, **sections))))


JUDGE = {"kind": "judge", "url": "http://here", "rubric_path": "RUBRIC"}
PARTS = [{"weight": 1, "reward": {"kind": "math"}}, {"weight": 0.5, "reward": {"kind": "math"}}]


def test_an_unchanged_run_goes_on(home):
    assert changes(kept(home), identity(spec(home))) == []


@pytest.mark.parametrize("name", TOKENIZER)
def test_another_tokenizer_is_another_run(home, name):
    """Injected: a file of the tokenizer is changed, or comes to be, between two starts."""
    then = kept(home)
    (home / "model" / name).write_text('{"other": 1}')
    [change] = changes(then, identity(spec(home)))
    assert change.startswith(f"digest of model.path's {name} was ")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"agent": {"kind": "tools", "tools": ["calc"], "format": "plain"}}, "agent.kind was single_turn, is tools"),
        ({"data": {"chat_template": False}}, "data.chat_template was True, is False"),
        ({"data": {"system_prompt": "Be brief."}}, "data.system_prompt was None, is Be brief."),
        ({"data": {"max_prompt_tokens": 512}}, "data.max_prompt_tokens was 1024, is 512"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature was 1.0, is 0.5"),
        ({"algorithm": {"kl_coef": 0.2}}, "algorithm.kl_coef was 0.1, is 0.2"),
        ({"algorithm": {"clip_high": 0.2}}, "algorithm.clip_high was 0.28, is 0.2"),
        ({"reward": {"kind": "http", "url": "http://here"}}, "reward.kind was math, is http"),
        ({"reward": {"on_failure": "zero"}}, "reward.on_failure was drop, is zero"),
    ],
)
def test_what_changes_samples_rewards_or_the_objective_is_named(home, changed, named):
    assert named in changes(kept(home), identity(spec(home, **changed)))


def test_the_weights_of_a_composite_and_the_text_of_a_rubric_are_compared(home):
    judge = JUDGE | {"rubric_path": str(home / "rubric.txt")}
    heavier = [PARTS[0], {"weight": 0.75, "reward": {"kind": "math"}}]
    assert changes(
        kept(home, reward={"kind": "composite", "parts": PARTS}),
        identity(spec(home, reward={"kind": "composite", "parts": heavier})),
    ) == ["weights of reward.parts was [1.0, 0.5], is [1.0, 0.75]"]
    then = kept(home, reward=judge)
    (home / "rubric.txt").write_text("{prompt} {response} {answer}")
    [change] = changes(then, identity(spec(home, reward=judge)))
    assert change.startswith("digest of reward.rubric_path was ")


def test_speed_place_and_patience_may_change(home):
    free = {
        "training": {"micro_batch_tokens": 99, "optimizer": {"clip_grad_norm": 2.0}},
        "reward": {"workers": 4, "timeout_s": 20},
        "engine": {"replicas": 2},
        "rollout": {"max_new_tokens": 128, "max_staleness": 1},
    }
    assert changes(kept(home), identity(spec(home, **free))) == []
    base = {key: value for key, value in TREE.items() if key != "algorithm"} | paths(home)
    searched = [
        identity(spec_from_tree(base | {"algorithm": {"name": "dapo", "dynamic_sampling_rounds": rounds}}, "test"))
        for rounds in (5, 10)
    ]
    assert changes(*searched) == []


def test_other_weights_behind_the_reference_model_are_noticed_and_without_one_they_are_free(home):
    """Injected: the weights keep names, shapes and sizes, and differ by a millionth."""
    then, free = kept(home), kept(home, algorithm={"kl_coef": 0})
    save_file({"weight": (torch.arange(300_000.0) + 2) * (1 + 1e-6)}, home / "model" / "model-2.safetensors")
    [change] = changes(then, identity(spec(home)))
    assert change.startswith("sampled digest of model.path's weights was ")
    assert changes(free, identity(spec(home, algorithm={"kl_coef": 0}))) == []


def test_a_key_that_an_earlier_checkpoint_does_not_have_is_not_compared(home):
    then = {"seed": 1234, "algorithm.name": "grpo"}
    assert changes(then, identity(spec(home, rollout={"temperature": 0.5}))) == []
    assert changes(then | {"seed": 5}, identity(spec(home))) == ["seed was 5, is 1234"]


def test_other_tools_are_another_run_and_their_patience_is_free(home):
    tools = {"kind": "tools", "tools": ["calc"], "format": "plain"}
    then = kept(home, agent=tools)
    assert changes(then, identity(spec(home, agent=tools | {"workers": 4, "timeout_s": 5}))) == []
    assert changes(then, identity(spec(home, agent=tools | {"max_turns": 2}))) == ["agent.max_turns was 8, is 2"]


def test_a_reference_model_that_comes_from_elsewhere_is_noticed(home):
    """Injected: model.megatron_path is set, or left out, between two starts."""
    converted = home / "converted"
    converted.mkdir()
    (converted / "manifest.json").write_text("{}")
    from_there = {"model": {"path": str(home / "model"), "megatron_path": str(converted)}}
    for then, now in ((kept(home), spec(home, **from_there)), (kept(home, **from_there), spec(home))):
        named = changes(then, identity(now))
        assert [each.partition(" was ")[0] for each in named] == [
            "digest of model.megatron_path",
            "sampled digest of model.path's weights",
        ]
