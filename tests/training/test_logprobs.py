"""Log-probabilities with a spread vocabulary, in chunks, equal log_softmax; so do their gradients."""

import pytest
import torch
import torch.distributed as dist

from slimerl.training import logprobs
from slimerl.training.logprobs import VocabularyShard, token_logprobs

POSITIONS, WIDTH, VOCABULARY, TEMPERATURE = 37, 16, 50, 0.6


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(POSITIONS, WIDTH, generator=random).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=random).to(dtype)
    tokens = torch.randint(0, VOCABULARY, (POSITIONS,), generator=random)
    upstream = torch.randn(POSITIONS, generator=random)
    return hidden.requires_grad_(), weight.requires_grad_(), tokens, upstream


def expected(dtype: torch.dtype = torch.float32, bonus: float = 0.0) -> tuple[torch.Tensor, ...]:
    hidden, weight, tokens, upstream = inputs(dtype)
    all_logprobs = torch.log_softmax((hidden @ weight.t()).float() / TEMPERATURE, dim=-1)
    chosen = all_logprobs[torch.arange(POSITIONS), tokens]
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    (chosen @ upstream + bonus * entropy @ upstream.flip(0)).backward()
    return chosen.detach(), entropy.detach(), hidden.grad, weight.grad


def on_shard(padded: int, chunk_bytes: int, kept_bytes: int, bonus: float = 0.0) -> tuple[torch.Tensor, ...]:
    """What one rank finds; gradients put together over the ranks."""
    logprobs.CHUNK_BYTES, logprobs.KEPT_BYTES = chunk_bytes, kept_bytes
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, weight, tokens, upstream = inputs()
    rows = padded // size
    whole = torch.zeros(padded, WIDTH)
    whole[:VOCABULARY] = weight.detach()
    own = whole[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    shard = VocabularyShard(rank * rows, VOCABULARY, dist.group.WORLD if size > 1 else None)
    found, entropy = token_logprobs(hidden, own, tokens, TEMPERATURE, shard)
    loss = found @ upstream
    # without a bonus the entropy takes no part in the backward pass
    (loss + bonus * entropy @ upstream.flip(0) if bonus else loss).backward()
    dist.all_reduce(hidden.grad)
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own.grad)
    return found.detach(), entropy.detach(), hidden.grad, torch.cat(parts)


WHOLE = 2**30


@pytest.mark.parametrize(
    ("size", "padded", "chunk_bytes", "kept_bytes"),
    [
        pytest.param(1, 50, WHOLE, WHOLE, id="one chunk"),
        pytest.param(1, 50, 2000, WHOLE, id="chunks kept"),
        pytest.param(1, 50, 2000, 0, id="chunks computed again"),
        pytest.param(2, 50, WHOLE, WHOLE, id="two ranks"),
        pytest.param(2, 56, 1000, 0, id="two ranks with padded rows in chunks"),
        pytest.param(4, 72, WHOLE, WHOLE, id="a rank with padding alone"),
    ],
)
@pytest.mark.parametrize("bonus", [0.0, 0.3], ids=["", "with entropy bonus"])
def test_logprobs_entropy_and_gradients_are_those_of_log_softmax(ranks, size, padded, chunk_bytes, kept_bytes, bonus):
    wanted = expected(bonus=bonus)
    for found in ranks.run(size, on_shard, padded, chunk_bytes, kept_bytes, bonus):
        assert torch.allclose(found[0], wanted[0], atol=1e-5)
        assert torch.allclose(found[1], wanted[1], atol=1e-5)
        assert torch.allclose(found[2], wanted[2], atol=1e-4)
        assert torch.allclose(found[3][:VOCABULARY], wanted[3], atol=1e-4)
        assert not found[3][VOCABULARY:].any(), "padding rows must never move"


def test_bfloat16_weights_give_float32_logprobs_of_their_logits():
    hidden, weight, tokens, upstream = inputs(torch.bfloat16)
    found, _ = token_logprobs(hidden, weight, tokens, TEMPERATURE, VocabularyShard(0, VOCABULARY))
    found.backward(upstream)
    wanted = expected(torch.bfloat16)
    assert found.dtype == torch.float32
    assert torch.allclose(found, wanted[0], atol=1e-5)
    assert torch.allclose(weight.grad.float(), wanted[3].float(), rtol=0.02, atol=0.1)


def test_no_positions_at_all_give_zero_gradients():
    hidden, weight, tokens, _ = inputs()
    found, _ = token_logprobs(hidden[:0], weight, tokens[:0], 1.0, VocabularyShard(0, VOCABULARY))
    found.sum().backward()
    assert found.shape == (0,)
    assert not weight.grad.any()
