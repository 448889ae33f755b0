"""A reward model's score as reward: of the tokens as they were sampled, in a worker or from a server."""

import asyncio

import pytest
import torch
from judging_service import judging_service
from tiny_models import make_tiny_model

from slimerl.rewards.build import build_reward, reads_tokens
from slimerl.rewards.outcome import Failed, RewardRequest, Scored
from slimerl.spec.reward import MathReward, ModelReward, ServedModelReward

TOKENS = (5, 9, 17, 1)
REQUEST = RewardRequest("0/a/1", "text that is not looked at", "", tokens=TOKENS)


def judged(spec, *requests):
    async def scene():
        made = build_reward(spec)
        await made.start()
        try:
            return [await made.score(request) for request in requests]
        finally:
            await made.close()

    return asyncio.run(scene())


def test_a_worker_gives_the_score_at_the_last_token(tmp_path):
    """Fault: a pooling that takes the end of sequence for padding, where both are one token, and reads before it."""
    from transformers import AutoModelForSequenceClassification

    make_tiny_model("qwen3", tmp_path / "base", tied=True)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1, pad_token_id=TOKENS[-1])
    model.save_pretrained(tmp_path / "model")
    hidden = model.model(torch.tensor([TOKENS])).last_hidden_state[0, -1]
    score = model.score(hidden).item()
    spec = ModelReward(kind="model", path=tmp_path / "model", correct_from=score + 1e-3)
    outcome, without = judged(spec, REQUEST, RewardRequest("0/a/2", "x", ""))
    assert (outcome.correct, outcome.reward) == (False, pytest.approx(score, abs=1e-5))
    assert isinstance(without, Failed)
    assert without.reason == "no_tokens"
    assert reads_tokens(spec)
    assert not reads_tokens(MathReward())


def test_a_server_is_asked_with_the_tokens_and_a_model_without_a_scalar_head_is_no_reward():
    async def scene():
        async with judging_service() as service:
            found = []
            for url in (service.url, f"{service.url}/vector"):
                made = build_reward(ServedModelReward(kind="served_model", url=url, correct_from=1.0, timeout_s=5.0))
                await made.start()
                found.append(await made.score(REQUEST))
                await made.close()
            return found, service.bodies

    (right, vector), bodies = asyncio.run(scene())
    assert right == Scored(1.5, True)
    assert (vector.reason, "no scalar head" in vector.detail) == ("garbled", True)
    assert bodies == [{"input_ids": list(TOKENS)}] * 2
