"""Grouping sequences into padded batches leaves every sequence's attention as it is alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=80)


@given(LENGTHS)
def test_each_sequence_is_in_one_group_and_no_group_is_padded_beyond_the_limit(lengths):
    from slimerl.training.attention import MAX_PADDED_SHARE, padded_groups

    groups = padded_groups(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        real, padded = sum(lengths[i] for i in group), lengths[group[0]] * len(group)
        assert max(lengths[i] for i in group) == lengths[group[0]]
        assert padded - real <= MAX_PADDED_SHARE * padded


def test_plain_attention_equals_torchs():
    import torch.nn.functional as F

    from slimerl.training.attention import plain_attention

    random = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 11, 8, generator=random, requires_grad=True)
    key, value = (torch.randn(3, 2, 11, 8, generator=random, requires_grad=True) for _ in range(2))
    upstream = torch.randn(3, 6, 11, 8, generator=random)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = plain_attention(query, key, value)
    assert torch.allclose(found, expected, atol=1e-6)
    wanted = torch.autograd.grad(expected, (query, key, value), upstream)
    got = torch.autograd.grad(found, (query, key, value), upstream)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True))


def test_packed_attention_equals_one_sequence_at_a_time():
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slimerl.training.attention import SdpaAttention
    from slimerl.training.batches import packed_bounds

    lengths = [3, 9, 1, 9, 4, 2]
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    attention = SdpaAttention(config, 1, None, "self", softmax_scale=0.3)
    random = torch.Generator().manual_seed(0)
    query = torch.randn(sum(lengths), 4, 8, generator=random, requires_grad=True)
    key, value = (torch.randn(sum(lengths), 2, 8, generator=random, requires_grad=True) for _ in range(2))
    upstream = torch.randn(sum(lengths), 32, generator=random)

    def alone(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        scores = (q @ k.transpose(-1, -2)) * 0.3
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return (F.softmax(scores.masked_fill(mask, float("-inf")), -1) @ v)[0].transpose(0, 1).flatten(1)

    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    expected = torch.cat([alone(*part) for part in parts])
    wanted = torch.autograd.grad(expected, (query, key, value), upstream)
    found = attention(query, key, value, packed_seq_params=packed_bounds(lengths, "cpu"))
    got = torch.autograd.grad(found, (query, key, value), upstream)
    assert torch.allclose(found, expected, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True))
