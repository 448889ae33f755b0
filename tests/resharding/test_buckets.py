"""Buckets: everything once, fused groups together, whatever the size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resharding_models import dense_configs

from slimerl.resharding.buckets import bucket_offsets, split_into_buckets
from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families import family_of
from slimerl.resharding.tensors import LogicalTensor


def tensor(name: str, floats: int = 16) -> LogicalTensor:
    return LogicalTensor(name, (floats,), torch.float32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(dense_configs(), st.integers(1, 1 << 16))
def test_w4_fused_groups_travel_together_at_every_bucket_size(config, bucket_bytes):
    """Fault: a bucket smaller than one tensor splits q|k|v; an engine that fuses them then loads a mixture."""
    family = family_of(config)
    tensors, groups = family.logical_tensors(config), family.fused_groups(config)
    buckets = split_into_buckets(tensors, groups, bucket_bytes)
    bucket_of = {tensor.name: number for number, bucket in enumerate(buckets) for tensor in bucket}
    assert sorted(tensor.name for bucket in buckets for tensor in bucket) == sorted(tensor.name for tensor in tensors)
    assert all(len({bucket_of[name] for name in group}) == 1 for group in groups)
    group_of = {name: group for group in groups for name in group}
    for bucket in buckets:
        _, size = bucket_offsets(bucket)
        assert size <= bucket_bytes or len({group_of.get(tensor.name, tensor.name) for tensor in bucket}) == 1


def test_w4_the_table_fuses_what_the_engine_fuses():
    config = {
        "model_type": "qwen2",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    layer = "model.layers.0."
    assert family_of(config).fused_groups(config) == [
        tuple(f"{layer}self_attn.{letter}_proj.weight" for letter in "qkv"),
        tuple(f"{layer}self_attn.{letter}_proj.bias" for letter in "qkv"),
        tuple(f"{layer}mlp.{kind}_proj.weight" for kind in ("gate", "up")),
    ]


def test_buckets_keep_the_order_and_fill_up():
    tensors = [tensor("a"), tensor("q"), tensor("b"), tensor("k"), tensor("c", 100)]
    buckets = split_into_buckets(tensors, [("q", "k")], 192)
    assert [[t.name for t in bucket] for bucket in buckets] == [["a", "q", "k"], ["b"], ["c"]]


def test_a_tensor_in_a_buffer_begins_at_a_cache_line():
    offsets, size = bucket_offsets([tensor("a", 1), tensor("b", 17), tensor("c", 16)])
    assert (offsets, size) == ([0, 64, 192], 256)


@pytest.mark.parametrize(
    ("names", "groups", "message"),
    [
        ([], [], "no tensors"),
        (["a", "b", "a"], [], "twice: a"),
        (["a"], [("a", "z")], "no tensors: z"),
        (["a", "b", "c"], [("a", "b"), ("b", "c")], "two fused groups: b"),
    ],
)
def test_w3_what_cannot_be_sent_as_it_stands_is_refused_by_name(names, groups, message):
    with pytest.raises(CoverageError, match=message):
        split_into_buckets([tensor(name) for name in names], groups, 100)
