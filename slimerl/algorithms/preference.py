"""Losses of pairs, a chosen and a rejected answer each.

Flows in: [pairs] tensors. Flows out: [tokens] tensors whose sum over a minibatch, divided by its number of tokens, is
the mean over its pairs. Invariant: samples 2k and 2k + 1 of a micro-batch are pair k, chosen before rejected; a pair is
never split.
"""

import torch

from slimerl.algorithms.sequences import Sequences
from slimerl.algorithms.terms import BatchTotals


def pair_count(sequences: Sequences, asked_by: str) -> int:
    """Raises ValueError: an odd number of samples."""
    if sequences.count % 2:
        raise ValueError(
            f"{asked_by}: {sequences.count} samples are no pairs; a pair must not be split over micro-batches"
        )
    return sequences.count // 2


def spread_over_pairs(values: torch.Tensor, sequences: Sequences, totals: BatchTotals) -> torch.Tensor:
    """[pairs] → [tokens]: each pair's value times T/P, in equal parts over its tokens (T tokens, P pairs in all)."""
    pair_of_token = sequences.of // 2
    tokens_of_pair = sequences.lengths.view(-1, 2).sum(1)
    return (values / tokens_of_pair)[pair_of_token] * (totals.tokens / totals.groups)


def preference_loss(margins: torch.Tensor) -> torch.Tensor:
    """-log σ(margin), without overflow."""
    return torch.nn.functional.softplus(-margins)
