"""FP8: scales are tensors of their own that go wherever their blocks go."""

from typing import Any

import pytest
import torch
from resharding_models import filled, random_state
from sparse_models import BLOCK, DEEPSEEK, GLM, PUBLISHED

from slimerl.engine.inside.digest import digest
from slimerl.resharding.buckets import aligned, split_into_buckets
from slimerl.resharding.families import BlockScales, ConfigError, Form, family_of
from slimerl.resharding.families.scales import scale_name
from slimerl.resharding.layouts import EngineLayout, LayoutError, MegatronLayout
from slimerl.resharding.proof import ProofError, WeightProof

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
LARGE = PUBLISHED["deepseek_v3_671b"] | {"num_hidden_layers": 5, "quantization_config": FP8}
"""DeepSeek-V3 but for the number of layers."""
FORM = Form(prediction=True, scales=BlockScales.of(LARGE))


def shapes_of_rank(config: dict[str, Any], layout: EngineLayout, form: Form = FORM) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for placement in family_of(config).engine_placements(config, layout, 0, form):
        seen = shapes.get(placement.parameter, placement.at.stops)
        shapes[placement.parameter] = tuple(map(max, seen, placement.at.stops))
    return shapes


def test_each_quantised_matrix_has_its_scales():
    tensors = family_of(LARGE).logical_tensors(LARGE, form=FORM)
    named = {tensor.name: tensor for tensor in tensors}
    quantised = {tensor.name for tensor in tensors if tensor.dtype == torch.float8_e4m3fn}
    for name in quantised:
        scale = named[scale_name(name)]
        assert (scale.shape, scale.dtype) == (tuple(-(-size // 128) for size in named[name].shape), torch.float32)
    plain = {tensor.name.split(".")[-2] for tensor in tensors if len(tensor.shape) == 2 and "scale" not in tensor.name}
    plain -= {name.split(".")[-2] for name in quantised}
    assert plain == {"embed_tokens", "lm_head", "gate", "eh_proj"}
    matrix = next(tensor for tensor in tensors if "kv_a_proj_with_mqa.weight_scale_inv" in tensor.name)
    assert matrix.shape == (5, 56), "576 rows are four and a half blocks"


def test_an_expert_parallel_engine_of_deepseek_v3_holds_these_scales():
    layout = EngineLayout(32, expert=32, data_attention=32, replicated_dense=True, replicated_shared=True)
    shapes = shapes_of_rank(LARGE, layout)
    layer = "model.layers.3."
    assert shapes[f"{layer}self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv"] == (17, 56)
    assert shapes[f"{layer}self_attn.q_b_proj.weight_scale_inv"] == (192, 12)
    assert shapes[f"{layer}mlp.experts.w13_weight_scale_inv"] == (8, 32, 56)
    assert shapes[f"{layer}mlp.experts.w2_weight_scale_inv"] == (8, 56, 16)
    assert shapes[f"{layer}mlp.shared_experts.gate_up_proj.weight_scale_inv"] == (32, 56)
    assert shapes["model.layers.0.mlp.down_proj.weight_scale_inv"] == (56, 144)
    assert shapes["draft.model.decoder.mlp.experts.w13_weight_scale_inv"] == (8, 32, 56)
    assert not any("scale" in name for name in shapes if "eh_proj" in name or "mlp.gate." in name)


def test_p3_boxes_of_scales_are_those_of_the_data_divided_by_the_block():
    layout = EngineLayout(4, expert=2)
    placements = family_of(LARGE).engine_placements(LARGE, layout, 3, FORM)
    at = {(placement.parameter, placement.tensor): placement for placement in placements}
    scales = [placement for placement in placements if placement.tensor.endswith("_scale_inv")]
    assert len(scales) > 100
    for scale in scales:
        data = at[scale.parameter.removesuffix("_scale_inv"), scale.tensor.removesuffix("_scale_inv")]
        for small, large in ((scale.box, data.box), (scale.at, data.at)):
            stacked = len(large.starts) - 2
            assert small.starts == large.starts[:stacked] + tuple(start // 128 for start in large.starts[stacked:])
            assert small.stops == large.stops[:stacked] + tuple(-(-stop // 128) for stop in large.stops[stacked:])


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (LARGE, EngineLayout(32, expert=32), r"\.mlp\.gate_proj\.weight: part 0 of 32 is \(576, 7168\)"),
        (LARGE, EngineLayout(32, expert=32, replicated_dense=True), r"shared_experts\.gate_proj.*\(64, 7168\)"),
        (LARGE | {"model_type": "kimi_k2"}, EngineLayout(32, expert=1), r"mlp\.gate_proj\.weight: part 0 of 32"),
        (GLM | {"n_shared_experts": 2}, EngineLayout(1), r"self_attn\.k_proj\.weight.* whole blocks of 128"),
    ],
)
def test_an_engine_that_would_cut_a_block_is_refused(config, layout, message):
    """SGLang refuses it as well; 18432 / 32 = 576 is no multiple of 128."""
    with pytest.raises(LayoutError, match=message):
        shapes_of_rank(config, layout)


def test_qwen3_235b_in_fp8_at_eight_gpus_needs_expert_parallelism():
    config = PUBLISHED["qwen3_235b_a22b"] | {"num_hidden_layers": 1}
    with pytest.raises(LayoutError, match=r"experts\.\{expert\}\.gate_proj\.weight.*\(192, 4096\)"):
        shapes_of_rank(config, EngineLayout(8))
    shapes = shapes_of_rank(config, EngineLayout(8, expert=8))
    assert shapes["model.layers.0.mlp.experts.w13_weight_scale_inv"] == (16, 24, 32)


@pytest.mark.parametrize("bucket_bytes", [1, 4000, 1 << 30])
def test_w4_data_and_scales_of_a_fused_parameter_travel_in_one_bucket(bucket_bytes):
    """Fault: a bucket ends between a matrix and its scales; the engine would compute with new data and old scales."""
    form = Form(prediction=True, scales=BlockScales(BLOCK))
    family = family_of(DEEPSEEK)
    tensors, groups = family.logical_tensors(DEEPSEEK, form=form), family.fused_groups(DEEPSEEK, form)
    bucket_of = {
        tensor.name: number
        for number, bucket in enumerate(split_into_buckets(tensors, groups, bucket_bytes))
        for tensor in bucket
    }
    together: dict[str, set[int]] = {}
    for placement in family.engine_placements(DEEPSEEK, EngineLayout(), 0, form):
        parameter, *slot = placement.parameter.removesuffix("_scale_inv"), *placement.at.starts[:-2]
        together.setdefault(f"{parameter} {slot}", set()).add(bucket_of.get(placement.tensor, -1))
    assert {parameter for parameter, buckets in together.items() if len(buckets - {-1}) > 1} == set()
    if bucket_bytes == 1:
        assert len(set(bucket_of.values())) > 100


def test_w11_ignored_modules_stay_unquantised_and_no_others():
    """Fault: an ignore list matched by a part of the name takes layer 1 for layer 10 too."""
    ignored = ["model.layers.1", "model.layers.4.mlp.shared_experts", "lm_head"]
    quantisation = FP8 | {"modules_to_not_convert": ignored}
    config = LARGE | {"num_hidden_layers": 12, "quantization_config": quantisation}
    tensors = family_of(config).logical_tensors(config, form=Form(scales=BlockScales.of(config)))
    plain = {tensor.name for tensor in tensors if tensor.name.endswith("_proj.weight") and tensor.dtype.itemsize > 1}
    attention = ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    shared = (f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
    assert plain == {f"model.layers.1.{name}.weight" for name in attention + mlp} | {
        f"model.layers.4.{name}.weight" for name in shared
    }


@pytest.mark.parametrize(
    ("ignored", "plain"),
    [
        ("self_attn.o_proj", "{layer}.self_attn.o_proj"),
        ("mlp.shared_experts.", "{layer}.mlp.shared_experts"),
        ("mlp.gate", None),
        ("experts", "{layer}.mlp.experts"),
    ],
)
def test_w11_an_ignored_module_may_be_named_from_its_middle_on_as_the_engine_does(ignored, plain):
    """Fault: such a list is taken to ignore nothing, and the engine keeps bf16 where FP8 is sent."""
    config = LARGE | {"quantization_config": FP8 | {"modules_to_not_convert": [ignored]}}
    everything = family_of(config).logical_tensors(config, form=Form(scales=BlockScales.of(config)))
    tensors = {tensor.name: tensor.dtype for tensor in everything if tensor.name.endswith("_proj.weight")}
    whole = {
        tensor.name: tensor.dtype
        for tensor in family_of(config).logical_tensors(config, form=Form(scales=BlockScales.of(LARGE)))
    }
    layers = range(config["num_hidden_layers"])
    left_out = tuple(f"model.layers.{plain.format(layer=layer)}." for layer in layers) if plain else ()
    expected = {name: torch.float32 if name.startswith(left_out) else whole[name] for name in tensors}
    assert tensors == expected


def test_w11_all_experts_of_a_layer_may_be_named_one_by_one_but_not_some():
    """Fault: what is said of the first expert is taken for what is said of all."""
    experts = [f"model.layers.4.mlp.experts.{number}" for number in range(LARGE["n_routed_experts"])]
    config = LARGE | {"quantization_config": FP8 | {"modules_to_not_convert": experts}}
    tensors = family_of(config).logical_tensors(config, form=Form(scales=BlockScales.of(config)))
    of_layer = [tensor for tensor in tensors if tensor.name.startswith("model.layers.4.mlp.experts.")]
    assert {tensor.dtype for tensor in of_layer} == {torch.float32}
    for some in (experts[:1], experts[1:]):
        config["quantization_config"]["modules_to_not_convert"] = some
        with pytest.raises(ConfigError, match=r"leaves out model\.layers\.4\.mlp\.experts\.\d+\.gate_proj"):
            family_of(config).logical_tensors(config, form=Form(scales=BlockScales.of(config)))


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "compressed-tensors"}, "compressed-tensors.* is not FP8 in square blocks"),
        (FP8 | {"weight_block_size": None}, "is not FP8 in square blocks"),
        (FP8 | {"weight_block_size": [1, 128]}, "is not FP8 in square blocks"),
        (FP8 | {"weight_block_size": [128, 128, 128]}, "is not FP8 in square blocks"),
        (FP8 | {"weight_block_size": [[128], [128]]}, "is not FP8 in square blocks"),
        (FP8 | {"weight_block_size": ["a", "a"]}, "'a'.* is not FP8 in square blocks"),
        (FP8 | {"weight_block_size": [0, 0]}, r"quantization_config\.weight_block_size = \[0, 0\]"),
        (FP8 | {"weight_block_size": [-128, -128]}, r"quantization_config\.weight_block_size = \[-128, -128\]"),
        ("fp8", "quantization_config = 'fp8' is no object"),
        (["fp8"], r"quantization_config = \['fp8'\] is no object"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, r"quantization_config\.modules_to_not_convert = 'lm_head'"),
        (FP8 | {"ignored_layers": [3]}, r"quantization_config\.ignored_layers = \[3\]"),
        (FP8 | {"ignored_layers": ["model.layers.0.mlp.up_proj"]}, r"leaves out some of .*gate_proj.*gate_up_proj"),
    ],
)
def test_a_quantisation_that_the_table_does_not_have_is_refused(quantisation, message):
    config = LARGE | {"quantization_config": quantisation}
    with pytest.raises(ConfigError, match=message):
        family_of(config).logical_tensors(config, form=Form(scales=BlockScales.of(config)))


def test_w12_data_and_scales_are_proven_on_every_rank_and_a_stale_scale_is_named():
    """Fault: one rank keeps the old scale of one block beside the new data; redundant experts are proven twice."""
    layout, form = EngineLayout(2, expert=2, redundant_experts=2), Form(scales=BlockScales(BLOCK))
    family, state = family_of(DEEPSEEK), random_state(DEEPSEEK, form)
    tensors = family.logical_tensors(DEEPSEEK, form=form)
    ranks = [family.engine_placements(DEEPSEEK, layout, rank, form) for rank in range(2)]
    proof = WeightProof(tensors, ranks)
    for name, tensor in state.items():
        proof.add(name, tensor)
    parameters = [filled(placements, state) for placements in ranks]

    def reports() -> list[dict[str, int]]:
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        found: list[dict[str, int]] = [{}, {}]
        for rank, placements in enumerate(ranks):
            for place in (place for place in placements if not place.is_padding):
                name, bounds = place.tensor, (place.box.starts, place.box.stops)
                view = place.view_of(parameters[rank][place.parameter])
                value = digest(view, name, shapes[name], bounds, proof.granules[name])
                found[rank][name] = (found[rank].get(name, 0) + value) % (1 << 64)
        return found

    proof.check("engine-0", reports())
    parameters[1]["model.layers.2.mlp.experts.w13_weight_scale_inv"][1, 0, 0] += 1
    with pytest.raises(
        ProofError, match=r"rank 1 .* of model\.layers\.2\.mlp\.experts\.6\.gate_proj\.weight_scale_inv$"
    ):
        proof.check("engine-0", reports())


@pytest.mark.parametrize("form", [Form(), Form(prediction=True), FORM])
def test_sizes_that_are_counted_without_names_are_those_of_the_tensors(form):
    for config in (LARGE, GLM):
        family = family_of(config)
        held = family.logical_tensors(config, torch.bfloat16, form)
        assert family.nbytes(config, torch.bfloat16, form) == sum(tensor.nbytes for tensor in held)
        stored = family.checkpoint_tensors(config, torch.bfloat16, form)
        assert family.nbytes(config, torch.bfloat16, form, checkpoint=True) == sum(tensor.nbytes for tensor in stored)
        groups = family.fused_groups(config, form)
        largest = split_into_buckets(held, groups, 1)
        assert family.bucket_extremes(config, torch.bfloat16, form) == (
            max(sum(aligned(tensor.nbytes) for tensor in bucket) for bucket in largest),
            sum(aligned(tensor.nbytes) for tensor in held),
        )
        assert family.numel(config) == sum(tensor.numel for tensor in family.logical_tensors(config))


def test_a_model_without_quantisation_has_no_scales():
    assert BlockScales.of(DEEPSEEK) is None


def test_a_trainer_holds_no_scales_whatever_its_engine_holds():
    placed = [
        family_of(DEEPSEEK).megatron_placements(DEEPSEEK, MegatronLayout(), 0, form)
        for form in (Form(prediction=True), Form(prediction=True, scales=BlockScales(BLOCK)))
    ]
    assert placed[0] == placed[1]
