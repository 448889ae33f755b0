"""What Hugging Face transformers says about tokens that an engine generated."""

from collections.abc import Sequence
from typing import Any

import torch


@torch.no_grad()
def logprobs_of(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens)]: log-probability of each token after prompt and earlier tokens, at temperature 1."""
    return _all_logprobs(model, prompt, tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def greedy_choices(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The most likely token at each place, given what the engine generated before it."""
    return _all_logprobs(model, prompt, tokens).argmax(dim=1).tolist()


def _all_logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, dim=-1)


def largest_difference(expected: torch.Tensor, found: Sequence[float]) -> float:
    return float((expected - torch.tensor(found)).abs().max())
