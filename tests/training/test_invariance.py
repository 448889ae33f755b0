"""The same steps give the same weights, loss and gradient norm, however they are split over ranks and micro-batches,
and whether or not a prompt is computed once for its group."""

from itertools import product
from pathlib import Path

import pytest
import tiny

from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec

STEPS = [tiny.random_step(seed) for seed in range(3)]
# an epsilon above the gradients' rounding: Adam otherwise turns 1e-9 against 2e-9 into a full-sized difference
OPTIMIZER = OptimizerSpec(lr=1e-2, eps=1e-4, weight_decay=0.1, clip_grad_norm=1.0)
WHOLE = 10_000
"""A budget that puts all samples of a rank into one micro-batch."""
CALL_S = 240.0
"""Of six trainings in one call."""
COUNTS = (1, 2, 4)
"""Micro-batches of a rank."""

LAYERS, PIPELINED_LAYERS = 2, 4
UNEVEN = "Ettt|tL"
SPLITS = {
    "one process": ParallelSpec(),
    "DP2": ParallelSpec(data=2),
    "TP2": ParallelSpec(tensor=2),
    "TP2 with SP": ParallelSpec(tensor=2, sequence_parallel=True),
    "PP2": ParallelSpec(pipeline=2),
    "uneven PP2": ParallelSpec(pipeline=2, pipeline_layout=UNEVEN),
    "PP2xVPP2": ParallelSpec(pipeline=2, virtual=2),
    "CP2": ParallelSpec(context=2),
    "TP2xPP2": ParallelSpec(tensor=2, pipeline=2, sequence_parallel=True),
    "TP2xDP2": ParallelSpec(tensor=2, data=2, sequence_parallel=True),
    "TP2xCP2": ParallelSpec(tensor=2, context=2, sequence_parallel=True),
    "PP2xDP2": ParallelSpec(pipeline=2, data=2),
}
SPARSE_SPLITS = {
    "EP2": ParallelSpec(data=2, expert=2),
    "EP2 over CP2": ParallelSpec(context=2, expert=2),
    "EP2 with ETP1 in TP2": ParallelSpec(tensor=2, expert=2, expert_tensor=1, sequence_parallel=True),
    "EP2 with ETP2 without TP": ParallelSpec(data=4, expert=2, expert_tensor=2),
    "TP2xEP2": ParallelSpec(tensor=2, data=2, expert=2, sequence_parallel=True),
    "EP2xDP2": ParallelSpec(data=4, expert=2),
    "PP2xEP2": ParallelSpec(pipeline=2, data=2, expert=2),
}
DENSE = {"dense": "qwen3", "dense, tied": "llama"}
SPARSE = {"MoE": "qwen3_moe", "MLA": "deepseek_v3"}


def cases():
    for name in DENSE:
        yield from ((name, split) for split in SPLITS)
    for name in SPARSE:
        # Megatron refuses experts under tensor parallelism without sequence parallelism
        yield from ((name, split) for split in (*SPLITS, *SPARSE_SPLITS) if split != "TP2")


def train(built, minibatches=1, budget=WHOLE, **packing):
    """(figures of each step, final weights by Hugging Face name, micro-batches of the first step)."""
    trainer = tiny.trainer(built, AlgorithmSpec(), OPTIMIZER, steps=len(STEPS))
    figures, count = [], 0
    for step in STEPS:
        batches = tiny.micro_batches(step, built, budget, minibatches, temperature=0.7, **packing)
        count = count or len(batches[0])
        figures.append(trainer.step(batches))
    return figures, tiny.collected(built), count


def train_each(model_path: Path, parallel: ParallelSpec, packings: list[dict]):
    grid = tiny.start(parallel)
    return [train(tiny.build(model_path, parallel, grid=grid), **packing) for packing in packings]


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    """By the model's name and layers: its path, and what one process, one micro-batch and no sharing make of it."""
    made = {}

    def get(name: str, pipeline: int = 1):
        layers = PIPELINED_LAYERS if pipeline > 1 else LAYERS
        if (name, layers) not in made:
            path = tmp_path_factory.mktemp("model")
            tiny.write_model(path, (DENSE | SPARSE)[name], tied="tied" in name, num_hidden_layers=layers)
            [[(figures, weights, count)]] = ranks.run(1, train_each, path, ParallelSpec(), [{}])
            assert count == 1
            made[name, layers] = path, figures, weights
        return made[name, layers]

    return get


@pytest.mark.parametrize(("model", "split"), cases())
def test_m4_three_steps_do_not_depend_on_the_split(ranks, reference, model, split):
    """1, 2 and 4 micro-batches, with and without shared prompts, on the ranks of one call."""
    parallel = (SPLITS | SPARSE_SPLITS)[split]
    path, expected_figures, expected_weights = reference(model, parallel.pipeline)
    packings = [{"at_least": count, "shared_prefix": shared} for count, shared in product(COUNTS, (False, True))]
    results = ranks.run(parallel.world_size, train_each, path, parallel, packings, deadline_s=CALL_S)
    for rank in results:
        for packing, (figures, weights, count) in zip(packings, rank, strict=True):
            assert count == max(packing["at_least"], 2 if parallel.virtual > 1 else 1)
            assert_same(figures, expected_figures)
            assert weights.keys() == expected_weights.keys()
            worst = {name: (weights[name] - expected_weights[name]).abs().max().item() for name in weights}
            assert max(worst.values()) <= 1e-5, (packing, max(worst, key=worst.__getitem__))


def assert_same(figures, expected_figures):
    for found, expected in zip(figures, expected_figures, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy", "train/approx_kl", "train/clip_fraction"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
        assert found["train/sampled_tokens"] == expected["train/sampled_tokens"]


@pytest.mark.parametrize("model", DENSE | SPARSE)
def test_weights_really_move(reference, model):
    from safetensors.torch import load_file

    path, _, trained = reference(model)
    given = load_file(path / "model.safetensors")
    moved = {name for name in given if (given[name] - trained[name]).abs().max() > 1e-3}
    assert {name for name in given if "e_score_correction_bias" not in name} == moved


def test_shared_prompts_save_tokens(ranks, reference):
    path = reference("dense")[0]
    [[(alone, _, _), (shared, _, _)]] = ranks.run(
        1, train_each, path, ParallelSpec(), [{"shared_prefix": False}, {"shared_prefix": True}]
    )
    for one, other, step in zip(alone, shared, STEPS, strict=True):
        repeated = sum(each.prompt_length for i, each in enumerate(step.samples) if i % 4)
        assert one["train/computed_tokens"] - other["train/computed_tokens"] == repeated


@pytest.mark.parametrize("parallel", [SPLITS["DP2"], SPLITS["CP2"], SPLITS["PP2"]], ids=["DP2", "CP2", "PP2"])
def test_m4_several_minibatches_do_not_depend_on_the_split_either(ranks, reference, parallel):
    path = reference("dense", parallel.pipeline)[0]
    packing = {"minibatches": 3, "budget": 45, "shared_prefix": True}
    [[(expected, weights, _)]] = ranks.run(1, train_each, path, ParallelSpec(), [{"minibatches": 3}])
    for [(figures, found, _)] in ranks.run(2, train_each, path, parallel, [packing]):
        # nine updates, where the other tests make three
        assert max((found[name] - weights[name]).abs().max().item() for name in weights) <= 3e-5
        assert figures[-1]["train/loss"] == pytest.approx(expected[-1]["train/loss"], rel=1e-5)
        assert figures[-1]["train/clip_fraction"] > 0
