"""With a recorded routing, a step is that of a plain program whose routers are told the same experts, however the step
is split; without a record a token is routed as ever."""

from pathlib import Path

import forced_routing
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file

from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec
from slimerl.training.capabilities import Capabilities
from slimerl.training.machine_arguments import machine_arguments, recompute_arguments
from slimerl.training.routing_record import RoutedShape

LAYERS, EXPERTS, TOPK = 4, 8, 4
SHAPES = {
    "qwen3_moe": RoutedShape(LAYERS, TOPK, EXPERTS, (0, 1, 2, 3)),
    # its first layer is dense: the engine counts it, Megatron's routers do not
    "deepseek_v3": RoutedShape(LAYERS, TOPK, EXPERTS, (1, 2, 3)),
}
STEP = tiny.random_step(seed=7, samples=8)
RANDOM = forced_routing.with_routing(STEP, forced_routing.random_routing(STEP, LAYERS, EXPERTS, TOPK))
BEFORE = [
    sample.routing[sample.prompt_length + np.flatnonzero(sample.sampled) - 1, -1] == -1 for sample in RANDOM.samples
]
UNRECORDED = float(np.concatenate(BEFORE).mean())
"""Of the tokens from which one was sampled."""
RATE = 1e3
# an epsilon far above the gradient makes Adam's update a plain gradient step: rate / epsilon times the gradient
PLAIN = OptimizerSpec(lr=RATE, eps=RATE, beta1=1e-7, beta2=1e-7, clip_grad_norm=1e9)
ALGORITHM = AlgorithmSpec(clip_low=1.0, clip_high=100.0)
SPLITS = {
    "TP2xEP2xDP2 with SP": ParallelSpec(tensor=2, data=2, expert=2, sequence_parallel=True),
    "TP2xCP2 with SP": ParallelSpec(tensor=2, context=2, sequence_parallel=True),
    "PP2xVPP2": ParallelSpec(pipeline=2, virtual=2),
    "uneven PP2": ParallelSpec(pipeline=2, pipeline_layout="Ettt|tL"),
}
CASES = [
    ("qwen3_moe", "TP2xEP2xDP2 with SP"),
    *(("deepseek_v3", split) for split in ("TP2xCP2 with SP", "PP2xVPP2", "uneven PP2")),
]
VARIANTS = (
    {"budget": 40, "shared_prefix": True},
    {"budget": 40, "at_least": 4, "recompute": "full"},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(path, transformers' model), by kind."""
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in SHAPES}
    return {kind: (path, tiny.write_model(path, kind, num_hidden_layers=LAYERS)) for kind, path in paths.items()}


@pytest.fixture
def deepseek(models):
    return models["deepseek_v3"]


def one_step(grid, path, step, shape, routing, algorithm=ALGORITHM, minibatches=1, recompute="none", **packing):
    """(figures, weights) of one step."""
    built = tiny.build(path, grid.sizes, grid=grid)
    for name, value in recompute_arguments(recompute).items():
        setattr(built.config, name, value)
    trainer = tiny.trainer(built, algorithm, PLAIN, steps=1, routing=routing)
    routed = shape if routing == "r3" else None
    figures = trainer.step(tiny.micro_batches(step, built, minibatches=minibatches, routed=routed, **packing))
    kept = [each for replays in trainer._routing._replays.values() for each in replays]
    assert not any(each.replay_backward_list or each.router_replay_action for each in kept)
    weights = tiny.collected(built)
    biases = [
        buffer.clone()
        for chunk in built.chunks
        for name, buffer in chunk.named_buffers()
        if name.endswith("expert_bias")
    ]
    return figures, weights, biases


def steps(path: Path, parallel: ParallelSpec, calls: list[dict]):
    grid = tiny.start(parallel)
    return [one_step(grid, path, **call) for call in calls]


def reference_gradient(model, step) -> dict[str, torch.Tensor]:
    """Of −mean(A · log π) over the sampled tokens: the first update's, where every ratio is 1."""
    model.zero_grad()
    tokens = sum(int(sample.sampled.sum()) for sample in step.samples)
    for sample in step.samples:
        routing = None if sample.routing is None else sample.routing.reshape(len(sample.tokens), LAYERS, TOPK)
        logprobs = torch.log_softmax(forced_routing.logits_of(model, sample.tokens, routing), dim=-1)
        at = sample.prompt_length + np.flatnonzero(sample.sampled)
        own = logprobs[at - 1, torch.from_numpy(sample.tokens[at]).long()]
        (-sample.advantage * own.sum() / tokens).backward()
    found: dict[str, torch.Tensor] = {}
    for name, each in model.named_parameters():
        found |= on_disk(name, each.grad.clone())
    return found


def on_disk(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """transformers stacks experts; checkpoints have each for itself."""
    prefix, stacked, kind = name.partition(".experts.")
    if not stacked or kind not in ("gate_up_proj", "down_proj"):
        return {name: tensor}
    parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {"down_proj": 0}
    return {
        f"{prefix}.experts.{expert}.{part}.weight": whole.chunk(len(parts))[at].clone()
        for expert, whole in enumerate(tensor)
        for part, at in parts.items()
    }


def assert_moved_by(found, given, gradient):
    for name, wanted in gradient.items():
        difference = (given[name] - found[name] - wanted).abs().max().item()
        size = wanted.abs().max().item()
        assert difference <= 1e-3 * size + 2e-6, f"{name}: {difference} of {size}"


@pytest.mark.parametrize(("kind", "split"), CASES)
def test_the_gradient_is_that_of_the_recorded_routing(ranks, models, kind, split):
    """Injected faults that this has found: routers told in another order than their layers', packs told apart from
    their records, a backward pass that routes anew, tensor-parallel parts that all take the first one's rows."""
    path, reference = models[kind]
    gradient, given = reference_gradient(reference, RANDOM), load_file(path / "model.safetensors")
    kept = [tensor for name, tensor in given.items() if name.endswith("e_score_correction_bias")]
    calls = [{"step": RANDOM, "shape": SHAPES[kind], "routing": "r3", **variant} for variant in VARIANTS]
    for rank in ranks.run(SPLITS[split].world_size, steps, path, SPLITS[split], calls):
        for figures, weights, biases in rank:
            assert figures["train/routing_unrecorded"] == pytest.approx(UNRECORDED)
            assert_moved_by(weights, given, gradient)
            # replayed tokens move no bias: their load is not what the bias has to even out
            assert all(buffer.std() > 0 and any(buffer.equal(each) for each in kept) for buffer in biases)
    own = reference_gradient(reference, STEP)
    router = next(name for name in gradient if name.endswith("gate.weight"))
    assert (own[router] - gradient[router]).norm() > 0.3 * own[router].norm(), "the records change what is computed"


def test_tokens_without_a_record_are_routed_as_without_replay(ranks, deepseek):
    path, _ = deepseek
    nothing = forced_routing.with_routing(STEP, [None] * len(STEP.samples))
    shape = SHAPES["deepseek_v3"]
    calls = [{"step": nothing, "shape": shape, "routing": routing, "budget": 40} for routing in ("none", "r3")]
    [[(figures, weights, _), (found, replayed, _)]] = ranks.run(1, steps, path, ParallelSpec(), calls)
    assert all(torch.equal(weights[name], replayed[name]) for name in weights)
    assert found == figures | {"train/routing_unrecorded": 1.0}


def test_r2_holds_the_routing_of_the_steps_first_pass_over_its_updates(ranks, deepseek):
    """What it is: the choice of the weights at the start of the step, as transformers makes it."""
    path, reference = deepseek
    first = [forced_routing.chosen(reference, sample.tokens, LAYERS, TOPK) for sample in STEP.samples]
    chosen = forced_routing.with_routing(STEP, first)
    # steps so long that routers choose otherwise afterwards
    common = {"step": chosen, "shape": SHAPES["deepseek_v3"], "minibatches": 2, "budget": 80}
    whole = [{**common, "routing": "r3"}, {**common, "routing": "none"}]
    [[(_, told, _), (_, free, _)]] = ranks.run(1, steps, path, ParallelSpec(), whole)
    calls = [{**common, "routing": "r2"}, {**common, "routing": "r2", "recompute": "full"}]
    for rank in ranks.run(2, steps, path, SPLITS["PP2xVPP2"], calls):
        for _, weights, _ in rank:
            assert max((weights[name] - told[name]).abs().max().item() for name in told) <= 1e-4
    assert max((free[name] - told[name]).abs().max().item() for name in told) > 1e-2


def test_the_reference_model_routes_by_itself(ranks, deepseek):
    """Megatron's list of routers is that of the process: a record of the policy would be replayed for any model."""
    path, reference = deepseek
    algorithm = AlgorithmSpec(kl_coef=0.1, kl_estimator="k2")
    call = {"step": RANDOM, "shape": SHAPES["deepseek_v3"], "routing": "r3", "algorithm": algorithm, "budget": 60}
    [[(figures, _, _)]] = ranks.run(1, steps, path, ParallelSpec(), [call])
    squares = []
    for sample in RANDOM.samples:
        at = sample.prompt_length + np.flatnonzero(sample.sampled)
        with torch.no_grad():
            routing = sample.routing.reshape(len(sample.tokens), LAYERS, TOPK)
            policy, own = (
                torch.log_softmax(forced_routing.logits_of(reference, sample.tokens, each), dim=-1)[
                    at - 1, torch.from_numpy(sample.tokens[at]).long()
                ]
                for each in (routing, None)
            )
        squares.append((policy - own) ** 2 / 2)
    expected = torch.cat(squares).mean().item()
    assert expected > 1e-3
    assert figures["train/reference_kl"] == pytest.approx(expected, rel=1e-3)


def attach_to_fused(path):
    from slimerl.training.routing_replay import RoutingMisplaced, RoutingReplay

    built = tiny.build(path, ParallelSpec())
    built.config.moe_router_fusion = True
    with pytest.raises(RoutingMisplaced, match="moe_router_fusion"):
        RoutingReplay(built.chunks, "r3")


def test_a_fused_router_which_would_ignore_the_record_is_not_built_and_refused(ranks, deepseek):
    gpu = Capabilities(cuda=True, transformer_engine=True)
    fused = [machine_arguments({"num_moe_experts": 8}, gpu, replays)["moe_router_fusion"] for replays in (False, True)]
    assert fused == [True, False]
    ranks.run(1, attach_to_fused, deepseek[0])
