"""What a policy observes between its turns is context and nothing else: no loss, no figure, no share in a mean."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file

from slimerl.rollout.prompts import Prompt
from slimerl.samples.sample import Sample
from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec
from slimerl.training.training_sample import TrainingSample

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))
from talker import STOP, Talker, policy_of, talk, tool_loop

RATE = 1e3
# an epsilon far above the gradient makes Adam's update a plain gradient step: rate / epsilon times the gradient
PLAIN = OptimizerSpec(lr=RATE, eps=RATE, beta1=1e-7, beta2=1e-7, clip_grad_norm=1e9)
ALGORITHM = AlgorithmSpec(clip_low=0.2, clip_high=0.2, correction="none")


def conversations() -> list[TrainingSample]:
    """Of two prompts, three samples each, of one to three turns; through the wire as the trainer gets them."""

    async def held(number: int) -> Sample:
        prompt = (10, 7 + number // 3)
        sample = Sample(f"g{number // 3}/{number}", f"g{number // 3}", f"p{number // 3}", prompt)
        turns = 2 + number % 2

        def say(tokens: Any, seed: int) -> list[int]:
            return [*b"no", STOP][len(tokens) - 2 :] if number == 5 else talk(tokens, seed, turns)

        loop = tool_loop()
        await loop(policy_of(sample, Talker(say)), sample, Prompt("p", prompt, ""))
        loop.texts.close()
        return sample

    samples = [asyncio.run(held(number)) for number in range(6)]
    advantages = [1.0, -0.5, -0.5, 0.7, 0.3, -1.0]
    return [TrainingSample.from_payload(one.payload(), each) for one, each in zip(samples, advantages, strict=True)]


SAMPLES = conversations()


def one_step(model_path: Path, samples: list[TrainingSample], shared_prefix: bool) -> Any:
    built = tiny.build(model_path, ParallelSpec())
    trainer = tiny.trainer(built, ALGORITHM, PLAIN, steps=1)
    batches = tiny.micro_batches(tiny.Step(samples), built, 90, shared_prefix=shared_prefix)
    return trainer.step(batches), tiny.collected(built)


def reference_gradient(model: torch.nn.Module) -> float:
    """Leaves it in the model's `.grad`; returns the mean distance of trainer and engine over the sampled tokens."""
    loss, distance, count = torch.zeros(()), 0.0, 0
    for sample in SAMPLES:
        tokens = torch.tensor(sample.tokens.astype(np.int64))
        logprobs = torch.log_softmax(model(tokens[None]).logits[0], -1)
        for place in range(sample.prompt_length, len(tokens)):
            if sample.sampled[place - sample.prompt_length]:
                policy = logprobs[place - 1, tokens[place]]
                loss = loss - (policy - policy.detach()).exp() * sample.advantage
                behavior = float(sample.behavior_logprobs[place - sample.prompt_length])
                distance, count = distance + abs(policy.item() - behavior), count + 1
    (loss / count).backward()
    return distance / count


def test_conversations_have_observed_tokens_in_their_middle():
    observed = [np.flatnonzero(~sample.sampled) for sample in SAMPLES]
    assert sum(map(len, observed)) > 15
    assert all(sample.sampled[0] and sample.sampled[-1] for sample in SAMPLES)
    assert len(observed[5]) == 0


@pytest.mark.parametrize("shared_prefix", [False, True], ids=["prompts apart", "prompts shared"])
def test_the_gradient_is_that_of_the_sampled_tokens_alone(ranks, tmp_path, shared_prefix):
    model = tiny.write_model(tmp_path, "qwen3")
    given = load_file(tmp_path / "model.safetensors")
    figures, found = ranks.run(1, one_step, tmp_path, SAMPLES, shared_prefix)[0]
    distance = reference_gradient(model)
    sampled = sum(int(sample.sampled.sum()) for sample in SAMPLES)
    assert figures["train/sampled_tokens"] == sampled
    assert figures["agreement/mean_abs_logprob_delta"] == pytest.approx(distance, rel=1e-4)
    moved = 0.0
    for name, parameter in model.named_parameters():
        change = found[name] - given[name]
        largest = parameter.grad.abs().max().item()
        assert (change + parameter.grad).abs().max().item() <= 1e-3 * largest + 2e-6, name
        moved = max(moved, largest)
    assert moved > 1e-2


def test_what_stands_beside_an_observed_token_in_the_arrays_is_never_read(ranks, tmp_path):
    """Injected: log-probabilities for observed tokens, as a careless loop might give them."""
    tiny.write_model(tmp_path, "qwen3")
    strange = [
        replace(each, behavior_logprobs=np.where(each.sampled, each.behavior_logprobs, -9).astype(np.float32))
        for each in SAMPLES
    ]
    plain, odd = (ranks.run(1, one_step, tmp_path, samples, False)[0] for samples in (SAMPLES, strange))
    assert plain[0] == odd[0]
    assert all(torch.equal(plain[1][name], odd[1][name]) for name in plain[1])
