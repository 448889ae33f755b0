"""Gathering over real process groups: bit-exact, on the first rank alone, with every rank in every collective."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from resharding_models import State, megatron_reference, random_state, same_bits

from slimerl.resharding.assemble import scatter
from slimerl.resharding.buckets import split_into_buckets
from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families import family_of
from slimerl.resharding.gather import Gather
from slimerl.resharding.layouts import MegatronLayout

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 51,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


def gathered(layout: MegatronLayout, bucket_bytes: int, dtype: torch.dtype) -> list[list[tuple[str, torch.Tensor]]]:
    """Every bucket that this rank sees; runs on each rank of the layout."""
    family, rank = family_of(CONFIG), dist.get_rank()
    ranks = [family.megatron_placements(CONFIG, layout, other) for other in range(layout.world_size)]
    tensors = family.logical_tensors(CONFIG, dtype)
    buckets = split_into_buckets(tensors, family.fused_groups(CONFIG), bucket_bytes)
    gather = Gather(ranks, buckets, dist.group.WORLD)
    parameters: State = {}
    if layout.pipeline == 1:
        parameters = megatron_reference(CONFIG, random_state(CONFIG), layout, rank)
    else:
        for place in ranks[rank]:
            parameters[place.parameter] = torch.empty(place.at.stops)  # the last piece reaches the end
        scatter(ranks[rank], random_state(CONFIG), parameters)
    return [list(bucket) for bucket in gather.run(parameters)]


@pytest.mark.parametrize(
    "layout",
    [MegatronLayout(tensor=2), MegatronLayout(data=2), MegatronLayout(pipeline=2)],
    ids=["tensor", "data", "pipeline"],
)
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20], ids=["a bucket per tensor", "one bucket"])
def test_w5_every_rank_joins_every_bucket_and_the_first_holds_the_checkpoint(
    ranks: RankPool, layout: MegatronLayout, bucket_bytes: int
):
    """Fault: a rank that owns nothing of a bucket (norms, or a data-parallel replica) leaves its collective out."""
    first, second = ranks.run(2, gathered, layout, bucket_bytes, torch.float32)
    assert len(first) == len(second) > 0
    assert all(bucket == [] for bucket in second)
    state = random_state(CONFIG)
    found: State = dict(pair for bucket in first for pair in bucket)
    assert found.keys() == state.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in state.items())


def test_values_are_converted_to_the_dtype_of_the_plan(ranks: RankPool):
    first, _ = ranks.run(2, gathered, MegatronLayout(tensor=2), 1 << 20, torch.bfloat16)
    state = random_state(CONFIG)
    assert all(same_bits(tensor, state[name].bfloat16()) for bucket in first for name, tensor in bucket)


def test_a_group_of_one_needs_no_process_group():
    layout, family, state = MegatronLayout(), family_of(CONFIG), random_state(CONFIG)
    tensors = family.logical_tensors(CONFIG)
    gather = Gather([family.megatron_placements(CONFIG, layout, 0)], [tensors])
    for _ in range(2):
        (bucket,) = gather.run(megatron_reference(CONFIG, state, layout, 0))
        assert all(same_bits(tensor, state[name]) for name, tensor in bucket)


def test_w2_the_plan_and_the_parameters_are_checked_before_anything_is_sent():
    layout, family = MegatronLayout(), family_of(CONFIG)
    placed = family.megatron_placements(CONFIG, layout, 0)
    parameters = megatron_reference(CONFIG, random_state(CONFIG), layout, 0)
    with pytest.raises(CoverageError, match=r"model\.norm\.weight"):
        Gather([[place for place in placed if place.tensor != "model.norm.weight"]], [family.logical_tensors(CONFIG)])
    parameters["output_layer.weight"] = parameters["output_layer.weight"][1:]
    gather = Gather([placed], [family.logical_tensors(CONFIG)])
    with pytest.raises(CoverageError, match=r"output_layer\.weight"):
        next(gather.run(parameters))
    with pytest.raises(ValueError, match="1 ranks, placements are given for 2"):
        Gather([placed, placed], [family.logical_tensors(CONFIG)])
