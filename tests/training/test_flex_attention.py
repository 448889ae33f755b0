"""FlexAttention over packs with shared prefixes, against a softmax over explicitly masked scores."""

import itertools

import pytest
import torch

from slimerl.training.flex_attention import NO_PARENT, ancestors, flex_attention_over_pack


def described(parents: list[int], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(segment, position, parent) of a pack whose segments stand one after the other."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    return segment, position, torch.tensor(parents)


def sees(query: int, key: int, segment: list[int], position: list[int], parents: list[int]) -> bool:
    """The rule, token by token."""
    if segment[query] == segment[key]:
        return position[key] <= position[query]
    above = parents[segment[query]]
    while above != NO_PARENT:
        if above == segment[key]:
            return True
        above = parents[above]
    return False


def brute_force(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, value)


PACKS = {
    "plain sequences": ([NO_PARENT, NO_PARENT, NO_PARENT], [3, 1, 5]),
    "a prompt and its responses": ([NO_PARENT, 0, 0, 0], [4, 2, 5, 1]),
    "a tree of turns": ([NO_PARENT, 0, 1, 1, 0, NO_PARENT, 5], [2, 3, 2, 1, 4, 3, 2]),
    "more than one block of the kernel": ([NO_PARENT, 0, 0], [140, 60, 70]),
}


@pytest.mark.parametrize(("parents", "lengths"), PACKS.values(), ids=PACKS)
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2)])
def test_a_token_sees_its_segments_past_and_all_it_continues(
    parents: list[int], lengths: list[int], heads: int, key_heads: int
) -> None:
    torch.manual_seed(0)
    segment, position, parent = described(parents, lengths)
    order = torch.randperm(len(segment))  # where a token stands in the pack is of no concern
    segment, position = segment[order], position[order]
    tokens, dim, value_dim = len(segment), 16, 8
    query = torch.randn(tokens, heads, dim)
    key = torch.randn(tokens, key_heads, dim)
    value = torch.randn(tokens, key_heads, value_dim)
    rows = (segment.tolist(), position.tolist(), parents)
    seen = torch.tensor([[sees(q, k, *rows) for k in range(tokens)] for q in range(tokens)])

    out = flex_attention_over_pack(query, key, value, segment, position, segment, position, parent)
    expected = brute_force(query, key, value, seen)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_queries_may_be_a_part_of_the_pack_and_scores_scaled_at_will() -> None:
    torch.manual_seed(0)
    segment, position, parent = described([NO_PARENT, 0], [3, 4])
    query, key, value = torch.randn(2, 1, 8), torch.randn(7, 1, 8), torch.randn(7, 1, 8)
    ends = torch.tensor([2, 6])
    out = flex_attention_over_pack(
        query, key, value, segment[ends], position[ends], segment, position, parent, scale=0.5
    )
    for row, end in enumerate(ends.tolist()):
        weights = (key[: end + 1, 0] @ query[row, 0] * 0.5).softmax(0)
        torch.testing.assert_close(out[row, 0], weights @ value[: end + 1, 0], rtol=1e-5, atol=1e-6)


def test_shared_prefix_gives_what_each_sequence_gives_alone() -> None:
    torch.manual_seed(0)
    prompt, responses = 5, [3, 1, 4]
    segment, position, parent = described([NO_PARENT, 0, 0, 0], [prompt, *responses])
    query, key, value = (torch.randn(len(segment), 2, 8) for _ in range(3))
    out = flex_attention_over_pack(query, key, value, segment, position, segment, position, parent)
    starts = [prompt, *itertools.accumulate(responses, initial=prompt)]
    for start, length in zip(starts[1:], responses, strict=False):
        alone = torch.cat([torch.arange(prompt), torch.arange(start, start + length)])
        causal = torch.ones(len(alone), len(alone), dtype=torch.bool).tril()
        expected = brute_force(query[alone], key[alone], value[alone], causal)
        torch.testing.assert_close(out[alone], expected, rtol=1e-5, atol=1e-5)


def test_ancestors_are_all_that_a_segment_continues() -> None:
    assert ancestors(torch.tensor([NO_PARENT, 0, 1])).tolist() == [
        [False, False, False],
        [True, False, False],
        [True, True, False],
    ]


@pytest.mark.parametrize("parents", [[0], [1, 0], [NO_PARENT, 2, 1]])
def test_a_segment_that_continues_itself_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="own ancestor"):
        ancestors(torch.tensor(parents))


def test_a_token_of_an_unknown_segment_is_refused() -> None:
    x, zero, one = torch.randn(1, 1, 8), torch.tensor([0]), torch.tensor([1])
    with pytest.raises(ValueError, match="query tokens name segments 1 to 1, but parent_of_segment describes 1"):
        flex_attention_over_pack(x, x, x, one, zero, zero, zero, torch.tensor([NO_PARENT]))
    with pytest.raises(ValueError, match="segment 0 continues segment 3"):
        ancestors(torch.tensor([3]))
