"""The plan of a sync: what travels is what the engine holds, whatever more the trainer has."""

from typing import Any

import pytest
import torch
from resharding_models import State, same_bits

from slimerl.resharding.assemble import scatter
from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families import BlockScales, Form, family_of
from slimerl.resharding.gather import Gather
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.quantise import on_the_wire, quantise
from slimerl.resharding.sync_plan import SyncPlan, plan_sync

GLM: dict[str, Any] = {
    "model_type": "glm4_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "dtype": "bfloat16",
}
PLAIN, WITH_DRAFT = Form(), Form(prediction=True)


def plan(trainer: Form = PLAIN, engine: Form = PLAIN) -> SyncPlan:
    layouts = MegatronLayout(), [0], EngineLayout()
    return plan_sync(GLM, family_of(GLM), *layouts, torch.bfloat16, 4096, trainer, engine)


def filled(trainer: Form) -> tuple[State, State]:
    """Random tensors in the trainer's form, and its parameters with them."""
    generator = torch.Generator().manual_seed(0)
    state = {
        tensor.name: torch.randn(tensor.shape, generator=generator).bfloat16()
        for tensor in family_of(GLM).logical_tensors(GLM, torch.bfloat16, trainer)
    }
    parameters: State = {}
    placements = family_of(GLM).megatron_placements(GLM, MegatronLayout(), 0, trainer)
    for place in placements:
        parameters[place.parameter] = torch.empty(
            place.at.stops, dtype=torch.bfloat16
        )  # the last piece reaches the end
    scatter(placements, state, parameters)
    return state, parameters


def test_the_prediction_layer_of_the_trainer_stays_there_unless_the_engine_has_one():
    made = plan(trainer=WITH_DRAFT)
    assert any(name.startswith("model.layers.2.") for name in made.kept_back)
    assert not any(tensor.name.startswith("model.layers.2.") for tensor in made.tensors)
    state, parameters = filled(WITH_DRAFT)
    gather = Gather(made.trainer_ranks, made.buckets, None, made.kept_back)
    found = dict(pair for bucket in gather.run(parameters) for pair in bucket)
    assert found.keys() == state.keys() - made.kept_back
    assert plan(WITH_DRAFT, WITH_DRAFT).kept_back == frozenset()


def test_what_the_engine_keeps_wider_than_the_model_travels_wide():
    """GLM's router and the correction bias of every router are fp32 in the engine."""
    made = plan()
    wide = {tensor.name for tensor in made.tensors if tensor.dtype == torch.float32}
    assert wide == {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"}
    state, parameters = filled(PLAIN)
    found = dict(pair for bucket in Gather(made.trainer_ranks, made.buckets).run(parameters) for pair in bucket)
    assert all(same_bits(found[name], state[name].float()) for name in wide)


def test_w2_a_tensor_that_the_engine_holds_and_the_trainer_does_not_is_named():
    with pytest.raises(
        CoverageError, match=r"the engines hold tensors that the trainer does not: .*model\.layers\.2\."
    ):
        plan(engine=WITH_DRAFT)


def test_w3_a_tensor_that_is_neither_sent_nor_kept_back_is_named():
    made = plan(trainer=WITH_DRAFT)
    with pytest.raises(CoverageError, match=r"which is no tensor of the model"):
        Gather(made.trainer_ranks, made.buckets)


def test_matrices_are_gathered_whole_and_become_the_data_and_scales_of_an_fp8_engine():
    scales = BlockScales(8)
    made = plan(trainer=WITH_DRAFT, engine=Form(scales=scales))
    state, parameters = filled(WITH_DRAFT)
    gather = Gather(made.trainer_ranks, made.gathered, None, made.kept_back)
    sent = [list(on_the_wire(bucket, made.by_name, scales)) for bucket in gather.run(parameters)]
    assert [{name for name, _ in bucket} for bucket in sent] == [{t.name for t in bucket} for bucket in made.buckets]
    found = dict(pair for bucket in sent for pair in bucket)
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
        t.name: (t.shape, t.dtype) for t in made.tensors
    }
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    whole = quantise(state[name], scales)
    assert same_bits(found[name], whole.data)
    assert same_bits(found[f"{name}_scale_inv"], whole.scales)


def test_an_engine_without_scales_is_sent_what_was_gathered():
    made = plan()
    assert made.gathered == made.buckets
