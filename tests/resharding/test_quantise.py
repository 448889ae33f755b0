"""FP8 blocks have the bytes of a second account, which goes element by element and knows nothing of torch's casts."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_models import BLOCK, DEEPSEEK, GLM

from slimerl.resharding.boxes import Box
from slimerl.resharding.families import BlockScales, ConfigError, Form, family_of
from slimerl.resharding.families.scales import scale_name
from slimerl.resharding.layouts import LayoutError, MegatronLayout
from slimerl.resharding.quantise import dequantise, on_the_wire, quantise, quantise_parameter
from slimerl.resharding.tensors import Placement

SCALES = BlockScales()
SMALL = BlockScales(BLOCK)
POWERS = BlockScales(powers_of_two=True)


def value_of(byte: int) -> float:
    """OCP 8-bit floating point, E4M3: 4 bits of exponent with bias 7, 3 of mantissa, no infinity."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte >> 7 else size


SIZES = [value_of(byte) for byte in range(127)]
"""Of the positive numbers; 127 is NaN."""


def nearest_byte(value: float) -> int:
    """Rounded to nearest, ties to the even mantissa; above the largest, the largest."""
    size = abs(value)
    best = min(range(127), key=lambda byte: (abs(SIZES[byte] - size), byte & 1))
    return best | (128 if math.copysign(1.0, value) < 0 else 0)


def brute_force(matrix: torch.Tensor, block: int, powers: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales, element by element."""
    values = matrix.float().numpy()
    rows, columns = values.shape
    data = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((math.ceil(rows / block), math.ceil(columns / block)), np.float32)
    for i, j in np.ndindex(scales.shape):
        here = [(r, c) for r in range(i * block, min((i + 1) * block, rows))
                for c in range(j * block, min((j + 1) * block, columns))]  # fmt: skip
        largest = max((abs(values[at]) for at in here if math.isfinite(values[at])), default=np.float32(0))
        scale = max(np.float32(largest) / np.float32(448), np.float32(2.0**-126)) if largest else np.float32(1)
        if powers:
            mantissa, exponent = math.frexp(scale)
            power = exponent - 1 if mantissa == 0.5 else exponent
            scale = np.float32(2.0 ** min(power, 119))  # 448 * 2^120 is no float32
        scales[i, j] = scale
        for at in here:
            data[at] = nearest_byte(float(values[at] / scale)) if math.isfinite(values[at]) else 0x7F
    return data, scales


def assert_same_bytes(matrix: torch.Tensor, scales: BlockScales) -> None:
    made = quantise(matrix, scales)
    data, expected = brute_force(matrix, scales.block, scales.powers_of_two)
    assert (made.data.dtype, made.scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert np.array_equal(made.scales.numpy().view(np.uint32), expected.view(np.uint32))
    assert np.array_equal(made.data.view(torch.uint8).numpy(), data)


def normal(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 8), (9, 13), (1, 1), (3, 20), (4, 0)])
def test_every_byte_is_that_of_the_brute_force_version_also_in_ragged_blocks(shape, dtype, powers):
    assert_same_bytes(normal(*shape, dtype=dtype), BlockScales(BLOCK, powers_of_two=powers))


def test_a_block_of_128_by_128_and_what_is_left_beside_it():
    assert_same_bytes(normal(130, 129), SCALES)


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0, -0.0, 0.0],
        [math.nan, 1.0, -2.5, 0.3],
        [math.nan] * 4,
        [math.inf, -math.inf, 1.0, 448.0],
        [-math.inf, 0.0, 0.0, 0.0],
        [3.4e38, -3.4e38, 1.0, 1e-30],
        [1e-45, 0.0, -1e-45, 0.0],
        [1e-38, 1e-40, -1e-38, 5e-39],
        [448.0, 447.0, 464.0, 0.001],
        [1.0, 2.0**-9 / 448, 2.0**-10 / 448, 3 * 2.0**-10 / 448],
    ],
)
def test_w11_all_zero_nan_and_extreme_blocks_survive(values, powers):
    """Fault: 0 / 0 in a block of zeros, a NaN or an infinity that takes its whole block along, a scale of zero."""
    matrix = torch.tensor(values).view(2, 2)
    beside = torch.cat([matrix, normal(2, 2, dtype=torch.float32)], dim=1)
    scales = BlockScales(2, powers_of_two=powers)
    assert_same_bytes(beside, scales)
    made = quantise(beside, scales)
    assert made.scales.isfinite().all()
    assert (made.scales > 0).all()
    back = dequantise(made, scales, torch.float32)
    assert torch.equal(back.isfinite(), beside.isfinite())
    assert torch.equal(back[:, 2:], dequantise(quantise(beside[:, 2:], scales), scales, torch.float32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32), min_size=6, max_size=6), st.booleans())
def test_any_float32_is_quantised_as_the_brute_force_version_does(values, powers):
    assert_same_bytes(torch.tensor(values).view(2, 3), BlockScales(2, powers_of_two=powers))


@pytest.mark.parametrize("scales", [SCALES, POWERS])
def test_the_round_trip_is_as_near_as_three_bits_of_mantissa_allow(scales):
    """Half a step: 2^-4 of a normal value, 2^-10 of a scale below."""
    matrix = normal(300, 260, dtype=torch.float32) * torch.logspace(-6, 2, 260)
    made = quantise(matrix, scales)
    wrong = (dequantise(made, scales, torch.float32) - matrix).abs()
    each = made.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :260]
    assert (wrong <= (matrix.abs() * 2**-4).maximum(each * 2**-10) * (1 + 1e-6)).all()
    assert (wrong > matrix.abs() * 2**-5).any()


def test_powers_of_two_are_the_least_that_leave_no_value_out():
    matrix = normal(256, 256, 3)
    plain, rounded = quantise(matrix, SCALES).scales, quantise(matrix, POWERS).scales
    assert torch.equal(rounded, torch.exp2(torch.log2(rounded).round()))
    assert ((rounded >= plain) & (rounded < 2 * plain)).all()
    exact = torch.full((128, 128), 448.0 * 2**-5)
    assert quantise(exact, POWERS).scales.item() == 2**-5


def test_transformers_reads_back_what_is_written():
    """`data * weight_scale_inv` of the block, by the code that loads such checkpoints."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    made = quantise(normal(256, 384), SCALES)
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(made.data, made.scales, torch.float32)
    assert torch.equal(theirs, dequantise(made, SCALES, torch.float32))


def test_a_large_matrix_is_converted_in_bands_of_the_same_bytes(monkeypatch):
    matrix = normal(30, 10)
    whole = quantise(matrix, SMALL)
    monkeypatch.setattr("slimerl.resharding.quantise.BAND_ELEMENTS", 1)
    banded = quantise(matrix, SMALL)
    assert torch.equal(whole.data.view(torch.uint8), banded.data.view(torch.uint8))
    assert torch.equal(whole.scales, banded.scales)


@pytest.mark.parametrize("bad", [torch.zeros(4), torch.zeros(2, 2, 2), torch.zeros(2, 2, dtype=torch.float64)])
def test_what_is_no_matrix_of_weights_is_refused(bad):
    with pytest.raises(ValueError, match="FP8 blocks are made of a matrix in bfloat16, float16 or float32"):
        quantise(bad, SCALES)


FAMILIES: dict[str, dict[str, Any]] = {"deepseek": DEEPSEEK, "glm": GLM}


def model_state(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = family_of(config).logical_tensors(config, torch.bfloat16, Form(prediction=True))
    generator = torch.Generator().manual_seed(1)
    return {t.name: torch.randn(t.shape, generator=generator).to(t.dtype) for t in tensors}


def wire_form(config: dict[str, Any], scales: BlockScales) -> dict[str, Any]:
    form = Form(prediction=True, scales=scales)
    return {t.name: t for t in family_of(config).logical_tensors(config, torch.bfloat16, form)}


@pytest.mark.parametrize("family", FAMILIES)
def test_w3_the_quantiser_makes_the_tensors_of_the_table_and_no_others(family):
    """Fault: a scale that the engines expect and nobody makes, or of another shape."""
    config = FAMILIES[family]
    planned = wire_form(config, SMALL)
    made = dict(on_the_wire(model_state(config).items(), planned, SMALL))
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == {
        name: (t.shape, t.dtype) for name, t in planned.items()
    }


def test_w11_ignore_lists_are_honoured_and_names_with_a_prefix_are_still_quantised():
    """Fault: patterns of names: `gate` in the ignore list takes `gate_proj` along, `layers.1` takes `layers.10`, and
    the draft layer (`model.layers.N` behind the last one) is forgotten because it is none of the model's layers."""
    quantisation = {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.2.self_attn.o_proj"],
    }
    config = DEEPSEEK | {"quantization_config": quantisation}
    scales = BlockScales.of(config)
    assert scales is not None
    state = model_state(config)
    made = dict(on_the_wire(state.items(), wire_form(config, scales), scales))
    plain = {name for name in state if made[name].dtype != torch.float8_e4m3fn and name.endswith("_proj.weight")}
    assert plain == {"model.layers.2.self_attn.o_proj.weight", "model.layers.4.eh_proj.weight"}
    assert made["model.layers.0.mlp.gate_proj.weight"].dtype == torch.float8_e4m3fn
    draft = "model.layers.4.mlp.experts.7.down_proj.weight"
    assert made[draft].dtype == torch.float8_e4m3fn
    assert torch.equal(made[scale_name(draft)], quantise(state[draft], scales).scales)
    for name in plain:
        assert torch.equal(made[name], state[name])


def test_a_tensor_that_the_engines_do_not_have_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"model\.extra\.weight: the engines have no such tensor"):
        list(on_the_wire([("model.extra.weight", torch.zeros(4, 4))], {}, SMALL))


def test_the_format_of_the_scales_is_read_from_the_config_or_refused():
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert BlockScales.of({"quantization_config": stated}) == SCALES
    assert BlockScales.of({"quantization_config": stated | {"scale_fmt": "ue8m0"}}) == POWERS
    with pytest.raises(ConfigError, match="scale_fmt 'mx4'"):
        BlockScales.of({"quantization_config": stated | {"scale_fmt": "mx4"}})


LAYOUTS = {
    "deepseek": [
        MegatronLayout(),
        MegatronLayout(tensor=2, data=2, expert=4, expert_tensor=1),
        MegatronLayout(tensor=2, expert_tensor=2),
        MegatronLayout(tensor=4, expert=4, expert_tensor=1, pipeline=2),
    ],
    "glm": [MegatronLayout(tensor=2, data=2, expert=2, expert_tensor=2)],
}


@pytest.mark.parametrize(("family", "layout"), [(name, layout) for name, each in LAYOUTS.items() for layout in each])
def test_p3_a_ranks_own_pieces_have_the_bytes_of_the_whole_tensor(family, layout):
    """Every quantised parameter of every rank: its data and scales are cut out of those of the whole tensors."""
    config = FAMILIES[family]
    state, planned = model_state(config), wire_form(config, SMALL)
    whole = {name: quantise(state[name], SMALL) for name in state if planned[name].dtype == torch.float8_e4m3fn}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    seen: set[str] = set()
    for rank in range(layout.world_size):
        by_parameter: dict[str, list[Placement]] = {}
        for placement in family_of(config).megatron_placements(config, layout, rank, Form(prediction=True)):
            if placement.tensor in whole:
                by_parameter.setdefault(placement.parameter, []).append(placement)
        for placements in by_parameter.values():
            parameter = filled(placements, state)
            made = quantise_parameter(parameter, placements, shapes, SMALL)
            assert_cut_from(whole, placements, made)
            seen |= {placement.tensor for placement in placements}
    assert seen == whole.keys()


def filled(placements: list[Placement], state: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, columns = map(max, zip(*(placement.at.stops for placement in placements), strict=True))
    parameter = torch.empty(rows, columns, dtype=torch.bfloat16)
    for placement in placements:
        placement.view_of(parameter).copy_(state[placement.tensor][placement.box.slices])
    return parameter


def assert_cut_from(whole: dict[str, Any], placements: list[Placement], made: Any) -> None:
    row = 0
    for placement in placements:
        of_tensor, box = whole[placement.tensor], placement.box
        data = of_tensor.data.view(torch.uint8)[box.slices]
        assert torch.equal(placement.view_of(made.data.view(torch.uint8)), data)
        first, last = (math.ceil(end / BLOCK) for end in (box.starts[0], box.stops[0]))
        left, right = (math.ceil(end / BLOCK) for end in (box.starts[1], box.stops[1]))
        assert torch.equal(made.scales[row : row + last - first], of_tensor.scales[first:last, left:right])
        row += last - first
    assert row == len(made.scales)


def test_heads_that_share_a_block_are_quantised_together():
    """Megatron keeps q, k, v head by head; heads of 2 rows share a block of 4, and its scale stands with the first."""
    state = {name: normal(8, 4, seed) for seed, name in enumerate("qk")}
    placements, row = [], 0
    for head in range(4):
        for name in state:
            box = Box((2 * head, 0), (2 * head + 2, 4))
            placements.append(Placement("qkv", Box((row, 0), (row + 2, 4)), name, box))
            row += 2
    made = quantise_parameter(filled(placements, state), placements, {"q": (8, 4), "k": (8, 4)}, SMALL)
    whole = {name: quantise(tensor, SMALL) for name, tensor in state.items()}
    assert_cut_from(whole, placements, made)
    assert torch.equal(made.scales, torch.cat([whole[name].scales[i : i + 1] for i in (0, 1) for name in "qk"]))


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (Box((0, 0), (6, 8)), r"up\.weight: this rank \(fc1\) holds rows 0 to 6 of 12, which cuts a block of 4"),
        (Box((0, 2), (12, 8)), r"up\.weight: this rank \(fc1\) holds columns 2 to 8 of 8, which cuts a block of 4"),
    ],
)
def test_a_part_that_ends_inside_a_block_is_refused_by_name(box, message):
    parameter = torch.zeros(box.shape, dtype=torch.bfloat16)
    placement = Placement("fc1", Box.whole(box.shape), "up.weight", box)
    with pytest.raises(LayoutError, match=message):
        quantise_parameter(parameter, [placement], {"up.weight": (12, 8)}, SMALL)
