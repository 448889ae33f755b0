"""Patches of random models and layouts: an engine rank then holds what a second account of the layout says, and only
what changed has travelled."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resharding_models import assert_same, dense_configs, empty_parameters, engine_reference, moe_configs, random_state

from slimerl.engine.inside.delta import units
from slimerl.engine.inside.packed import BucketError
from slimerl.engine.inside.patch import apply_part, unpack_patch
from slimerl.resharding.buckets import split_into_buckets
from slimerl.resharding.families import family_of
from slimerl.resharding.layouts import EngineLayout
from slimerl.resharding.patches import PatchWriter
from slimerl.resharding.sent_state import SentState

State = dict[str, torch.Tensor]
SIZE = 2


def next_state(state: State, share: float, random: np.random.Generator) -> State:
    """Some elements of some tensors moved to a neighbour or anywhere."""
    moved = {}
    for name, tensor in state.items():
        moved[name] = tensor.clone()
        if random.random() < 0.8:
            flat = units(moved[name])
            changed = random.random(len(flat)) < share
            steps = random.choice([1, -1, 12_345], int(changed.sum()))
            flat[changed] += steps.astype(np.int64).astype(flat.dtype)
    return moved


class Engine:
    """The parameters of every rank, and nothing else of an engine."""

    def __init__(self, config: dict[str, Any], tensors: State) -> None:
        family = family_of(config)
        layout, self._config = EngineLayout(tensor=SIZE), config
        self.placements = [family.engine_placements(config, layout, rank) for rank in range(SIZE)]
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self.ranks = [empty_parameters(placed, dtypes) for placed in self.placements]

    def apply(self, patches: list[bytearray]) -> None:
        for parameters, patch in zip(self.ranks, patches, strict=True):
            for part, body in unpack_patch(patch):
                apply_part(parameters, part, body)

    def assert_holds(self, state: State) -> None:
        for rank, parameters in enumerate(self.ranks):
            assert_same(parameters, engine_reference(self._config, state, SIZE, rank))


@settings(deadline=None, max_examples=40)
@given(dense_configs(tensor=SIZE, engine=SIZE) | moe_configs(tensor=SIZE, expert_tensor=SIZE), st.data())
def test_p3_after_a_whole_rewrite_and_deltas_every_rank_holds_the_last_state(
    config: dict[str, Any], data: st.DataObject
) -> None:
    """All bits of the parameters are set before: an element that no part writes, or padding left alone, shows."""
    family, random = family_of(config), np.random.default_rng(data.draw(st.integers(0, 2**32)))
    current = random_state(config)
    tensors = family.logical_tensors(config, next(iter(current.values())).dtype)
    buckets = split_into_buckets(tensors, family.fused_groups(config), data.draw(st.sampled_from([64, 1 << 30])))
    engine, sent = Engine(config, current), SentState()
    patches = PatchWriter(engine.placements, sent)
    for share in (1.0, 0.02, 0.0, 0.5):
        sent.begin()
        for bucket in buckets:
            names = [tensor.name for tensor in bucket]
            changes = sent.take([(name, current[name]) for name in names])
            engine.apply(patches.changing(names, changes) if changes else patches.whole(names))
        engine.assert_holds(current)
        current = next_state(current, share, random)


def test_an_unchanged_tensor_takes_no_part_and_a_replaced_one_travels_as_it_is() -> None:
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    current = random_state(config)
    engine, sent = Engine(config, current), SentState()
    patches, names = PatchWriter(engine.placements, sent), list(current)
    sent.take(list(current.items()))
    engine.apply(patches.whole(names))
    replaced, moved = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
    random = np.random.default_rng(1)
    after = {name: tensor.clone() for name, tensor in current.items()}
    units(after[replaced])[:] = random.integers(0, 1 << 16, after[replaced].numel())
    units(after[moved])[5] += 1
    sent.begin()
    written = patches.changing(names, sent.take(list(after.items())))
    for patch in written:
        forms = {part["parameter"]: part["form"] for part, _ in unpack_patch(patch)}
        assert forms == {replaced: "whole", moved: "steps"}
    engine.apply(written)
    engine.assert_holds(after)


def test_a_patch_for_another_model_is_refused_by_name() -> None:
    part: Any = {"parameter": "norm", "at": [[0], [4]], "shape": [4], "dtype": "float32", "form": "whole", "nbytes": 16}
    body = memoryview(bytearray(16))
    for parameters, message in (
        ({}, "norm, which the model does not have"),
        ({"norm": torch.zeros(4, dtype=torch.bfloat16)}, "norm in float32, it is kept in torch.bfloat16"),
    ):
        with pytest.raises(BucketError, match=message):
            apply_part(parameters, part, body)
