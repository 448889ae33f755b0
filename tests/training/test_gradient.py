"""The gradient of a GRPO step equals that of a plain autograd program over the Hugging Face model."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec

STEP = tiny.random_step(seed=7, samples=8)
ALGORITHM = AlgorithmSpec(clip_low=0.1, clip_high=0.15, correction="token_tis", correction_cap=1.5)
TEMPERATURE = 0.8
RATE = 1e3
# an epsilon far above the gradient makes Adam's update a plain gradient step: rate / epsilon times the gradient
PLAIN = OptimizerSpec(lr=RATE, eps=RATE, beta1=1e-7, beta2=1e-7, clip_grad_norm=1e9)


def one_step(model_path: Path, parallel: ParallelSpec, minibatches: int):
    built = tiny.build(model_path, parallel)
    trainer = tiny.trainer(built, ALGORITHM, PLAIN, steps=1)
    figures = trainer.step(tiny.micro_batches(STEP, built, 40, minibatches, TEMPERATURE))
    return figures, tiny.collected(built)


def logprobs_of(model, sample) -> torch.Tensor:
    """Log-probabilities of the sampled tokens, from the definition."""
    tokens = torch.from_numpy(sample.tokens).long()
    distribution = torch.log_softmax(model(tokens[None]).logits[0] / TEMPERATURE, dim=-1)
    found = []
    for offset, sampled in enumerate(sample.sampled):
        if sampled:
            at = sample.prompt_length + offset
            found.append(distribution[at - 1, tokens[at]])
    return torch.stack(found)


def reference_step(model, minibatches: int) -> float:
    """Train `model` in place; returns the mean loss over all tokens."""
    parts = [STEP.samples[8 * i // minibatches : 8 * (i + 1) // minibatches] for i in range(minibatches)]
    with torch.no_grad():
        proximal = {sample.sample_id: logprobs_of(model, sample) for sample in STEP.samples}
    total, count = 0.0, 0
    for part in parts:
        model.zero_grad()
        loss, tokens = torch.zeros(()), 0
        for sample in part:
            policy, old = logprobs_of(model, sample), proximal[sample.sample_id]
            behavior = torch.from_numpy(sample.behavior_logprobs[sample.sampled])
            for p, o, b in zip(policy, old, behavior, strict=True):
                ratio, a = (p - o).exp(), sample.advantage
                surrogate = min(ratio * a, ratio.clamp(0.9, 1.15) * a)
                if a < 0:
                    surrogate = max(surrogate, torch.tensor(3.0 * a))
                loss = loss - min((o - b).exp(), torch.tensor(1.5)) * surrogate
                tokens += 1
        (loss / tokens).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad
        total, count = total + loss.item(), count + tokens
    return total / count


def step_that_is_no_number(model_path: Path, parallel: ParallelSpec) -> str:
    from slimerl.training.step import NotFinite

    trainer = tiny.trainer(built := tiny.build(model_path, parallel), ALGORITHM, PLAIN, steps=1)
    first, *others = STEP.samples
    broken = tiny.Step([replace(first, advantage=float("nan")), *others])
    try:
        trainer.step(tiny.micro_batches(broken, built, 40))
    except NotFinite as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("parallel", [ParallelSpec(data=2), ParallelSpec(pipeline=2)], ids=["DP2", "PP2"])
def test_a_gradient_that_is_no_number_ends_the_step_on_every_rank(ranks, tmp_path, parallel):
    """Injected: the advantage of one sample is NaN. Weights that it has spoilt are neither sent nor saved: what comes
    behind the step does not come."""
    tiny.write_model(tmp_path, "qwen3", num_hidden_layers=2)
    for said in ranks.run(2, step_that_is_no_number, tmp_path, parallel):
        assert said.startswith("the gradient norm is nan; the weights are spoilt")


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("parallel", [ParallelSpec(), ParallelSpec(tensor=2)], ids=["one process", "TP2"])
def test_a_step_equals_plain_autograd(ranks, tmp_path, parallel, minibatches):
    model = tiny.write_model(tmp_path, "qwen3")
    given = load_file(tmp_path / "model.safetensors")
    figures, found = ranks.run(parallel.world_size, one_step, tmp_path, parallel, minibatches)[0]
    loss = reference_step(model, minibatches)
    assert figures["train/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
    moved = 0.0
    for name, parameter in model.named_parameters():
        difference = (found[name] - parameter.detach()).abs().max().item()
        change = (parameter.detach() - given[name]).abs().max().item()
        assert difference <= 1e-3 * change + 2e-6, f"{name}: {difference} of a change of {change}"
        moved = max(moved, change)
    assert moved > 1e-2
    assert (figures["train/clip_fraction"] > 0) == (minibatches > 1)
