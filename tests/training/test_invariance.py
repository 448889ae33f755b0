"""The same step gives the same weights, loss and gradient norm, however it is split over ranks and micro-batches."""

from pathlib import Path

import pytest
import tiny

from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec

STEPS = [tiny.random_step(seed) for seed in range(3)]
# an epsilon above the gradients' rounding: Adam otherwise turns 1e-9 against 2e-9 into a full-sized difference
OPTIMIZER = OptimizerSpec(lr=1e-2, eps=1e-4, weight_decay=0.1, clip_grad_norm=1.0)
WHOLE = 10_000
"""A budget that puts all samples of a rank into one micro-batch."""

SPLITS = {
    "two micro-batches": (ParallelSpec(), 90),
    "four micro-batches": (ParallelSpec(), 45),
    "TP2": (ParallelSpec(tensor=2), WHOLE),
    "TP2 with sequence parallelism": (ParallelSpec(tensor=2, sequence_parallel=True), 90),
    "DP2": (ParallelSpec(data=2), WHOLE),
    "DP2 with micro-batches": (ParallelSpec(data=2), 45),
    "TP2xDP2": (ParallelSpec(tensor=2, data=2), 45),
    "TP2xDP2 with sequence parallelism": (ParallelSpec(tensor=2, data=2, sequence_parallel=True), WHOLE),
}


def train(model_path: Path, parallel: ParallelSpec, budget: int, algorithm: AlgorithmSpec, minibatches: int = 1):
    """(figures of each step, final weights by Hugging Face name, micro-batches of the first step)."""
    built = tiny.build(model_path, parallel)
    trainer = tiny.trainer(built, algorithm, OPTIMIZER, steps=3)
    figures, count = [], 0
    for step in STEPS:
        batches = tiny.micro_batches(step, built.grid, budget, minibatches, temperature=0.7)
        count = count or len(batches[0])
        figures.append(trainer.step(batches))
    return figures, tiny.collected(built), count


@pytest.fixture(scope="module", params=[("qwen3", False), ("llama", True)], ids=["qwen3", "llama-tied"])
def reference(request, ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.write_model(path, *request.param)
    [(figures, weights, count)] = ranks.run(1, train, path, ParallelSpec(), WHOLE, AlgorithmSpec())
    assert count == 1
    return path, figures, weights


@pytest.mark.parametrize("split", SPLITS)
def test_m4_three_steps_do_not_depend_on_the_split(ranks, reference, split):
    path, expected_figures, expected_weights = reference
    parallel, budget = SPLITS[split]
    results = ranks.run(parallel.world_size, train, path, parallel, budget, AlgorithmSpec())
    assert (results[0][2] > 1) == (budget != WHOLE)
    for figures, weights, _ in results:
        assert weights.keys() == expected_weights.keys()
        worst = max((weights[name] - expected_weights[name]).abs().max().item() for name in weights)
        assert worst <= 1e-5
        for found, expected in zip(figures, expected_figures, strict=True):
            for name in ("train/loss", "train/grad_norm", "train/entropy", "train/approx_kl", "train/clip_fraction"):
                assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
            assert found["train/sampled_tokens"] == expected["train/sampled_tokens"]


def test_weights_really_move(reference):
    from safetensors.torch import load_file

    path, _, trained = reference
    given = load_file(path / "model.safetensors")
    assert all((given[name] - trained[name]).abs().max() > 1e-3 for name in given)


def test_m4_several_minibatches_do_not_depend_on_the_split_either(ranks, reference):
    path = reference[0]
    [(expected, weights, _)] = ranks.run(1, train, path, ParallelSpec(), WHOLE, AlgorithmSpec(), 3)
    for figures, found, _ in ranks.run(2, train, path, ParallelSpec(data=2), 45, AlgorithmSpec(), 3):
        assert max((found[name] - weights[name]).abs().max().item() for name in weights) <= 1e-5
        assert figures[-1]["train/loss"] == pytest.approx(expected[-1]["train/loss"], rel=1e-5)
        assert figures[-1]["train/clip_fraction"] > 0
