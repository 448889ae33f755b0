"""Attention over packs equals a masked softmax over all pairs, also where sequences share a beginning."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

FAMILIES_OF_LENGTHS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), max_size=5)), min_size=1, max_size=6
)
"""Beginnings, each with the lengths of what continues it."""


def segments_of(families):
    from slimerl.training.segments import Segment

    segments, start = [], 0
    for beginning, continued in families:
        parent = len(segments)
        segments.append(Segment(start, beginning))
        start += beginning
        for length in continued:
            segments.append(Segment(start, length, parent))
            start += length
    return segments


def visible(segments) -> torch.Tensor:
    """[tokens, tokens] bool, from the definition: a token sees itself and what stands before it on its way."""
    lengths = [segment.length for segment in segments]
    owner = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(lengths))
    parent = torch.tensor([-1 if segment.parent is None else segment.parent for segment in segments])[owner]
    places = torch.arange(len(owner))
    own = (owner[:, None] == owner[None]) & (places[None] <= places[:, None])
    return own | (parent[:, None] == owner[None])


def brute_force(query, key, value, seen, scale):
    heads = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value).flatten(1)


def attention_module(scale: float):
    from slimerl.training.attention import SdpaAttention

    return SdpaAttention(SimpleNamespace(context_parallel_size=1), 1, None, "self", softmax_scale=scale)


def random_heads(tokens: int, value_dim: int = 8, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    shapes = ((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, value_dim))
    made = [torch.randn(*shape, generator=random).to(dtype).requires_grad_() for shape in shapes]
    return made, torch.randn(tokens, 4 * value_dim, generator=random)


@given(FAMILIES_OF_LENGTHS)
@settings(deadline=None, max_examples=40)
def test_a_pack_equals_the_masked_softmax_with_its_gradient(families):
    from slimerl.training.segments import lay_segments

    segments = segments_of(families)
    laid = lay_segments(segments, multiple=1)
    (query, key, value), upstream = random_heads(laid.total, value_dim=6)
    expected = brute_force(query, key, value, visible(segments), 0.3)
    wanted = torch.autograd.grad(expected, (query, key, value), upstream)
    found = attention_module(0.3)(query, key, value, packed_seq_params=laid.packed)
    assert found.shape == (laid.total, 1, 24)
    got = torch.autograd.grad(found[:, 0], (query, key, value), upstream)
    assert torch.allclose(found[:, 0], expected, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, wanted, strict=True))


@given(FAMILIES_OF_LENGTHS, st.integers(2, 4))
@settings(deadline=None, max_examples=40)
def test_the_stripes_of_context_parallel_ranks_together_are_the_whole(families, size):
    from slimerl.training.segments import Stripes, lay_segments

    segments = segments_of(families)
    whole = lay_segments(segments, multiple=size)
    (query, key, value), _ = random_heads(whole.total)
    everything = attention_module(0.3)(query, key, value, packed_seq_params=whole.packed)
    found, positions = torch.empty_like(everything), torch.empty_like(whole.packed.positions)
    # what gathering makes of the ranks' keys and values: one part after the other
    key, value = (torch.cat([x[rank::size] for rank in range(size)]) for x in (key, value))
    for rank in range(size):
        laid = lay_segments(segments, 1, Stripes(rank, size))
        assert laid.total == whole.total
        own = torch.from_numpy(laid.own)
        found[own] = attention_module(0.3)(query[own], key, value, packed_seq_params=laid.packed)
        positions[own] = laid.packed.positions
    assert torch.allclose(found, everything, atol=1e-5)
    assert torch.equal(positions, whole.packed.positions)


@given(FAMILIES_OF_LENGTHS)
@settings(deadline=None, max_examples=40)
def test_a_position_is_the_number_of_other_tokens_seen(families):
    from slimerl.training.segments import lay_segments

    segments = segments_of(families)
    assert lay_segments(segments, 1).packed.positions.tolist() == (visible(segments).sum(1) - 1).tolist()


@given(FAMILIES_OF_LENGTHS)
@settings(deadline=None, max_examples=40)
def test_no_block_is_padded_beyond_the_limit_and_plain_ones_need_no_mask(families):
    from slimerl.training.segments import MAX_PADDED_SHARE, lay_segments

    segments = segments_of(families)
    blocks = lay_segments(segments, 1).packed.blocks
    seen = visible(segments)
    assert sorted(token for block in blocks for token in block.tokens.tolist()) == list(range(len(seen)))
    for block in blocks:
        tokens = block.queries.flatten()[block.real]
        pairs = sum(int(seen[each].sum()) for each in tokens)
        padded = block.queries.shape[0] * block.queries.shape[1] * block.keys.shape[1]
        # a causal piece of n queries and k keys counts as n·k
        assert padded <= 2 * pairs / (1 - MAX_PADDED_SHARE) or len(block.queries) == 1
        assert (block.last is None) == (block.queries.shape[1] == block.keys.shape[1] and block.hidden is None)


@pytest.mark.parametrize("continued", [[], [5, 9, 9, 2]], ids=["plain", "shared beginning"])
def test_the_bfloat16_path_equals_torchs_kernel(continued):
    from slimerl.training.segments import lay_segments

    laid = lay_segments(segments_of([(11, continued), (7, continued)]), 1)
    (query, key, value), upstream = random_heads(laid.total, dtype=torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in (query, key, value)]
    module = attention_module(0.3)
    expected = module(*exact, packed_seq_params=laid.packed)
    found = module(query, key, value, packed_seq_params=laid.packed)
    assert torch.allclose(found.double(), expected, atol=2e-2)
    wanted = torch.autograd.grad(expected[:, 0], exact, upstream.double())
    got = torch.autograd.grad(found[:, 0], (query, key, value), upstream.bfloat16())
    assert all(torch.allclose(a.double(), b, atol=5e-2) for a, b in zip(got, wanted, strict=True))


@given(FAMILIES_OF_LENGTHS, st.integers(1, 3))
@settings(deadline=None, max_examples=5)
def test_the_mask_for_a_gpu_shows_what_the_blocks_show(families, size):
    from slimerl.training.attention import _mask
    from slimerl.training.flex_attention import masked_attention
    from slimerl.training.segments import Stripes, lay_segments

    for rank in range(size):
        laid = lay_segments(segments_of(families), 1, Stripes(rank, size))
        (query, key, value), _ = random_heads(laid.total)
        query, key, value = (x.detach() for x in (query[torch.from_numpy(laid.own)], key, value))
        with torch.no_grad():
            expected = attention_module(0.3)(query, key, value, packed_seq_params=laid.packed)[:, 0]
            found = masked_attention(query, key, value, _mask(laid.packed), 0.3).flatten(1)
        assert torch.allclose(found, expected, atol=1e-5)
