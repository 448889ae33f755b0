"""Samples → the tensors of one micro-batch: sequences one after the other (THD), and the tokens that count.

Flows in: `TrainingSample`s. Flows out: a `MicroBatch`. Invariant: the per-token tensors have one entry for each
*sampled* token, in the order of the pack; prompt, tool and padding tokens have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slimerl.training.model import WantedTokens
from slimerl.training.training_sample import TrainingSample

PADDING_TOKEN = 0
"""Any id of the vocabulary will do: nothing is read at its position."""


@dataclass(frozen=True)
class MicroBatch:
    """`tokens` [1, pack]; `behavior_logprobs` and `advantages` [sampled tokens], in the order of `wanted`."""

    tokens: torch.Tensor
    packed: PackedSeqParams
    wanted: WantedTokens
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    padding_tokens: int

    @property
    def sampled_tokens(self) -> int:
        return len(self.advantages)


def pack(
    samples: Sequence[TrainingSample], temperature: float, multiple: int, device: torch.device | str = "cpu"
) -> MicroBatch:
    """Put samples one after the other.

    Args:
        temperature: of sampling.
        multiple: the pack's length is padded to a multiple of this, by a sequence of its own (sequence
            parallelism cuts the pack into equal parts). No samples at all make a pack of padding alone.
    """
    lengths = [len(sample.tokens) for sample in samples]
    padding = -sum(lengths) % multiple if lengths else multiple
    tokens = np.full(sum(lengths) + padding, PADDING_TOKEN, dtype=np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    after, behavior, advantages = [_NO_INTEGERS], [_NO_REALS], [_NO_REALS]
    for sample, end in zip(samples, ends, strict=True):
        start = end - len(sample.tokens)
        tokens[start:end] = sample.tokens
        after.append(start + sample.prompt_length + np.flatnonzero(sample.sampled))
        behavior.append(sample.behavior_logprobs[sample.sampled])
        advantages.append(np.full(int(sample.sampled.sum()), sample.advantage, dtype=np.float32))
    where = np.concatenate(after)
    pack_tokens = torch.from_numpy(tokens)
    return MicroBatch(
        tokens=pack_tokens[None].to(device),
        packed=packed_bounds([*lengths, padding] if padding else lengths, device),
        wanted=WantedTokens(
            positions=torch.from_numpy(where - 1).to(device),
            tokens=pack_tokens[torch.from_numpy(where)].to(device),
            temperature=temperature,
        ),
        behavior_logprobs=torch.from_numpy(np.concatenate(behavior)).to(device),
        advantages=torch.from_numpy(np.concatenate(advantages)).to(device),
        padding_tokens=padding,
    )


_NO_INTEGERS = np.empty(0, dtype=np.int64)
_NO_REALS = np.empty(0, dtype=np.float32)


def packed_bounds(lengths: Sequence[int], device: torch.device | str) -> PackedSeqParams:
    """What tells Megatron where each sequence of a pack starts and ends."""
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
