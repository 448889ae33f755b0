"""Log-probabilities of given tokens from hidden states, with the vocabulary spread over tensor-parallel ranks.

Flows in: hidden states of the positions whose next token is asked for, this rank's rows of the output layer, the
tokens. Flows out: for each position the log-probability of its token and the entropy, both with gradient.
Only these positions are multiplied with the output layer; prompts cost nothing here. Work is done in chunks of
rows, so that the logits of a whole micro-batch need not exist at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slimerl.training.logits_budget import CHUNK_BYTES, KEPT_BYTES
from slimerl.training.matmul import product

CACHED_BYTES = 4 * 2**20
"""What an elementwise pass may touch at a time and still find in the cache."""


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows [first, first + rows of the weight) of the output layer; rows from `size` on are padding."""

    first: int
    size: int
    """Tokens of the vocabulary, over all ranks and without padding."""
    group: Any = None
    """Tensor-parallel process group; None: the vocabulary is whole."""


def token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, temperature: float, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of `tokens` under softmax(hidden · weightᵀ / temperature), and that distribution's entropy.

    Args:
        hidden: [positions, width]. Its gradient is this rank's part of a sum over the tensor-parallel ranks.
        weight: [rows of this rank, width].
        tokens: [positions], ids of the whole vocabulary.
        temperature: as in sampling; engines report log-probabilities of the tempered distribution.

    Returns:
        Two float32 tensors [positions], in nats.
    """
    return _TokenLogprobs.apply(hidden, weight, tokens, temperature, shard)


class _TokenLogprobs(torch.autograd.Function):
    """Saves per chunk the log-probabilities within this rank's part of the vocabulary, or nothing (`KEPT_BYTES`)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        shard: VocabularyShard,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keep = hidden.shape[0] * weight.shape[0] * 4 <= KEPT_BYTES
        local = tokens - shard.first
        here = (local >= 0) & (local < weight.shape[0])
        local = local.clamp(0, max(0, weight.shape[0] - 1))
        kept, parts = [], []
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            within, normaliser = _local_log_softmax(hidden[rows], weight, temperature, shard)
            parts.append(_Part.of(within, normaliser, local[rows], here[rows]))
            if keep:
                kept.append(within)
        logprobs, entropy, share = _combine(_Part.joined(parts, hidden.device), shard.group)
        ctx.save_for_backward(hidden, weight, local, here, share, entropy, *kept)
        ctx.temperature, ctx.shard = temperature, shard
        # no gradient of the entropy where no loss asks for it
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, local, here, share, entropy, *kept = ctx.saved_tensors
        grad = torch.zeros_like(share) if grad is None else grad / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight: torch.Tensor | None = None
        for index, rows in enumerate(_chunks(hidden.shape[0], weight.shape[0])):
            within = kept[index] if kept else _local_log_softmax(hidden[rows], weight, ctx.temperature, ctx.shard)[0]
            whole = within.add_(share[rows, None])
            bonus = None if grad_entropy is None else (whole + entropy[rows, None]).mul_(whole.exp())
            # d logprob / d logits = onehot - probabilities
            logits = whole.exp_().mul_(-grad[rows, None])
            if bonus is not None and grad_entropy is not None:
                # d entropy / d logits = -probabilities · (logprobs + entropy)
                logits -= bonus.mul_(grad_entropy[rows, None] / ctx.temperature)
            logits.scatter_add_(1, local[rows, None], (grad[rows] * here[rows])[:, None])
            logits = logits.to(weight.dtype)
            grad_hidden[rows] = product(logits, weight.t())
            part = product(logits.t(), hidden[rows].t())
            # several chunks add up in float32 also where the weight is bfloat16
            grad_weight = part if grad_weight is None else grad_weight.float().add_(part)
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(positions: int, vocabulary: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // (4 * max(1, vocabulary)))
    return (slice(start, min(start + step, positions)) for start in range(0, positions, step))


def _local_log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax within this rank's rows, and the log-normaliser of these rows: [positions, rows], [positions]."""
    logits = product(hidden, weight).float()
    if temperature != 1.0:
        logits /= temperature
    padding = shard.first + weight.shape[0] - shard.size
    if padding > 0:
        logits[:, max(0, weight.shape[0] - padding) :] = torch.finfo(torch.float32).min
    highest, at = logits.max(dim=-1)
    within = torch.log_softmax(logits, dim=-1)
    return within, highest - within.gather(1, at[:, None])[:, 0]


def _entropy(within: torch.Tensor) -> torch.Tensor:
    """Of each row of log-probabilities; a few rows at a time, so that what is thrown away stays in the cache."""
    rows = max(1, CACHED_BYTES // (4 * max(1, within.shape[1])))
    return torch.cat([-part.exp().mul_(part).sum(-1) for part in within.split(rows)])


@dataclass(frozen=True)
class _Part:
    """What one rank knows of each position: the log-normaliser of its rows, the token's log-probability within them
    (0 where another rank has the token), and the entropy within them."""

    normaliser: torch.Tensor
    token: torch.Tensor
    entropy: torch.Tensor

    @staticmethod
    def of(within: torch.Tensor, normaliser: torch.Tensor, local: torch.Tensor, here: torch.Tensor) -> "_Part":
        token = (within.gather(1, local[:, None])[:, 0] + normaliser) * here
        return _Part(normaliser, token, _entropy(within))

    @staticmethod
    def joined(parts: list["_Part"], device: torch.device) -> torch.Tensor:
        """[3, positions]."""
        if not parts:
            return torch.zeros(3, 0, device=device)
        return torch.cat([torch.stack([part.normaliser, part.token, part.entropy]) for part in parts], dim=1)


def _combine(part: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probability, entropy, log share of this rank's rows in the whole distribution), each [positions]."""
    size = 1 if group is None else dist.get_world_size(group)
    everyone = part.new_empty(size, *part.shape)
    if size == 1:
        everyone[0] = part
    else:
        dist.all_gather_into_tensor(everyone.view(size * part.shape[0], -1), part.contiguous(), group=group)
    normaliser, token, entropy = everyone.unbind(1)
    total = normaliser.logsumexp(0)
    shares = normaliser - total
    # entropy of a mixture of disjoint parts: Σ share · (entropy within - log share)
    mixed = (shares.exp() * (entropy - shares)).sum(0)
    return token.sum(0) - total, mixed, shares[0 if size == 1 else dist.get_rank(group)]
