"""Products with weights: each row alone, among few and among many."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimerl.engine.inside.invariant_linear import LARGE, linear

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(48, 48), (160, 128), (LARGE // 128 - 1, 128), (LARGE // 128, 128), (960, 576)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]} x {shape[1]}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 300), start=st.integers(0, 100), seed=st.integers(0, 5))
def test_a_row_of_the_product_does_not_depend_on_the_others(
    shape: tuple[int, int], dtype: torch.dtype, rows: int, start: int, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=noise).to(dtype)
    batch = torch.randn(400, shape[1], generator=noise).to(dtype)
    assert torch.equal(linear(batch[start : start + rows], weight), linear(batch, weight)[start : start + rows])


@pytest.mark.parametrize("rows", [(), (0,), (1,), (3,), (7,), (2, 1), (2, 9)])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]} x {shape[1]}")
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product(rows: tuple[int, ...], shape: tuple[int, int], biased: bool) -> None:
    noise = torch.Generator().manual_seed(len(rows))
    weight, bias = torch.randn(shape, generator=noise), torch.randn(shape[0], generator=noise)
    batch = torch.randn(*rows, shape[1], generator=noise)
    expected = batch.double() @ weight.double().t() + (bias if biased else 0)
    out = linear(batch, weight, bias if biased else None)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-5)
