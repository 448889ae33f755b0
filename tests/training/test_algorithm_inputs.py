"""What algorithms are given beyond their samples' advantages: right in itself, and the same for every split."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from test_loop import run_loop, run_spec
from trainer_control_service import ControlService

from slimerl.spec.load import spec_from_tree
from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec

STEPS = [tiny.random_step(seed) for seed in range(3)]
# an epsilon above the gradients' rounding: Adam otherwise turns 1e-9 against 2e-9 into a full-sized difference
OPTIMIZER = OptimizerSpec(lr=1e-2, eps=1e-4)
CALL_S = 240.0
"""Of three trainings in one call."""
ALGORITHMS = {
    "grpo with a reference": {"name": "grpo", "kl_coef": 0.5, "reference_refresh_steps": 2},
    "reinforce_pp with the divergence in the reward": {
        "name": "reinforce_pp",
        "kl_coef": 0.5,
        "kl_in": "reward",
        "gamma": 0.9,
    },
    "reinforce_pp_baseline": {"name": "reinforce_pp_baseline", "kl_coef": 0.5, "gamma": 0.9},
}
SPLITS = {
    "DP2": (ParallelSpec(data=2), 1),
    "DP2, two minibatches": (ParallelSpec(data=2), 2),
    "PP2": (ParallelSpec(pipeline=2), 2),
    "CP2": (ParallelSpec(context=2), 2),
    "TP2": (ParallelSpec(tensor=2, sequence_parallel=True), 1),
}
"""With the number of minibatches of a step."""


def train(model: Path, parallel: ParallelSpec, packing: dict):
    """By algorithm: the figures of each step and the weights afterwards."""
    grid, found = tiny.start(parallel), {}
    for name, algorithm in ALGORITHMS.items():
        built = tiny.build(model, parallel, grid=grid)
        trainer = tiny.trainer(built, AlgorithmSpec(**algorithm), OPTIMIZER, steps=len(STEPS))
        figures = [trainer.step(tiny.micro_batches(step, built, 10_000, **packing)) for step in STEPS]
        found[name] = figures, tiny.collected(built)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.write_model(path, "qwen3", num_hidden_layers=4)
    return path


@pytest.fixture(scope="module")
def reference(ranks, model):
    """By number of minibatches: what one process and one micro-batch make of it."""
    [one] = ranks.run(1, train, model, ParallelSpec(), {}, deadline_s=CALL_S)
    [two] = ranks.run(1, train, model, ParallelSpec(), {"minibatches": 2}, deadline_s=CALL_S)
    return {1: one, 2: two}


@pytest.mark.parametrize("split", SPLITS)
def test_m4_reference_and_whitened_token_advantages_do_not_depend_on_the_split(ranks, model, reference, split):
    parallel, minibatches = SPLITS[split]
    packing = {"minibatches": minibatches, "at_least": 2, "shared_prefix": True}
    for of_rank in ranks.run(parallel.world_size, train, model, parallel, packing, deadline_s=CALL_S):
        for name, (expected_figures, expected) in reference[minibatches].items():
            figures, weights = of_rank[name]
            for found, wanted in zip(figures, expected_figures, strict=True):
                for key in ("train/loss", "train/grad_norm", "train/reference_kl", "train/sampled_tokens"):
                    assert found[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-6), (name, key)
            worst = max((weights[tensor] - expected[tensor]).abs().max().item() for tensor in expected)
            assert worst <= 1e-5, name


def test_the_divergence_grows_as_the_policy_moves_and_is_gone_after_a_refresh(reference):
    figures, _ = reference[1]["grpo with a reference"]
    first, second, refreshed = (each["train/reference_kl"] for each in figures)
    assert first == pytest.approx(0, abs=1e-6)
    assert second > 1e-3
    assert refreshed == pytest.approx(0, abs=1e-6)


def advantages_given(model: Path):
    """What the loss was given, micro-batch by micro-batch, in a step of two minibatches after another step."""
    built = tiny.build(model, ParallelSpec())
    algorithm = AlgorithmSpec(**ALGORITHMS["reinforce_pp with the divergence in the reward"])
    trainer = tiny.trainer(built, algorithm, OPTIMIZER, steps=len(STEPS))
    trainer.step(tiny.micro_batches(STEPS[0], built, 10_000))
    given = []
    loss = trainer._algorithm.loss

    def noted(tokens):
        if tokens.sequences:
            given.append(tokens)
        return loss(tokens)

    trainer._algorithm.loss = noted
    trainer.step(tiny.micro_batches(STEPS[1], built, 10_000, minibatches=2, at_least=2))
    return [
        replace(each, policy_logprobs=each.policy_logprobs.detach(), entropy=each.entropy.detach()) for each in given
    ]


def test_the_loss_is_given_discounted_returns_whitened_over_all_minibatches(ranks, model):
    """Against a loop over tokens: r_t = -β(log π_prox - log π_ref), the outcome added at the last."""
    [batches] = ranks.run(1, advantages_given, model)
    assert len(batches) == 4
    outcomes = {float(sample.behavior_logprobs[0]): sample.advantage for sample in STEPS[1].samples}
    returns, found = [], []
    for tokens in batches:
        for number in range(tokens.sequences):
            own = tokens.sequence == number
            rewards = (-0.5 * (tokens.proximal_logprobs - tokens.reference_logprobs)[own]).double().numpy()
            # a sample is known again by what the engine reported of its first token
            rewards[-1] += outcomes[float(tokens.behavior_logprobs[own][0])]
            tail, of_sample = 0.0, []
            for reward in rewards[::-1]:
                tail = reward + 0.9 * tail
                of_sample.append(tail)
            returns += of_sample[::-1]
            found += tokens.advantages[own].tolist()
    expected = (np.array(returns) - np.mean(returns)) / np.std(returns)
    assert len(found) == sum(int(sample.sampled.sum()) for sample in STEPS[1].samples)
    assert np.abs(np.array(found) - expected).max() < 1e-4
    assert max((each.proximal_logprobs - each.reference_logprobs).abs().max() for each in batches) > 1e-2
    assert not torch.equal(batches[2].policy_logprobs, batches[2].proximal_logprobs), "the second update has moved it"


@pytest.mark.parametrize("name", ["grpo with a reference", "reinforce_pp_baseline"])
def test_a_run_from_its_spec_is_given_everything(ranks, tmp_path, name):
    tiny.write_model(tmp_path / "model", "qwen3")
    tree = run_spec(tmp_path, ParallelSpec(data=2)).model_dump(mode="json") | {"algorithm": ALGORITHMS[name]}
    spec = spec_from_tree(tree, "test")
    with ControlService(spec.run_dir, 2):
        (_, records), _ = ranks.run(2, run_loop, spec)
    assert records[1][1]["train/reference_kl"] == pytest.approx(0, abs=1e-6)
    assert records[2][1]["train/reference_kl"] > 1e-5
    if name == "reinforce_pp_baseline":
        # whitened, and the ratio of the first update is 1: the loss is minus their mean
        algorithm = AlgorithmSpec(**ALGORITHMS[name])
        assert records[1][1]["train/loss"] == pytest.approx(
            algorithm.kl_coef * records[1][1]["train/reference_kl"], abs=1e-5
        )
