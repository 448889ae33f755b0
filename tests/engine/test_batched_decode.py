"""Decode attention of a whole batch against each request on its own."""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimerl.engine.inside.batched_decode import MAX_GATHERED, _decode_in_batches, attend, padded_requests

pytestmark = pytest.mark.usefixtures("one_thread")

SLOTS, CONTEXT = 600, 256


class Batch:
    """Requests whose keys and values lie anywhere in a cache."""

    def __init__(
        self, lengths: list[int], heads: int, key_heads: int, dim: int, value_dim: int, dtype: torch.dtype
    ) -> None:
        noise = torch.Generator().manual_seed(len(lengths))
        self.lengths = torch.tensor(lengths)
        self.pool_indices = torch.randperm(len(lengths), generator=noise)
        self.req_to_token = torch.stack([torch.randperm(SLOTS, generator=noise)[:CONTEXT] for _ in lengths]).int()
        self.query = torch.randn(len(lengths), heads, dim, generator=noise).to(dtype)
        self.keys = torch.randn(SLOTS, key_heads, dim, generator=noise).to(dtype)
        # latent attention keeps its values within its keys
        self.values = self.keys[..., :value_dim] if value_dim < dim else self.keys.flip(0)

    def attended(self, rows: list[int] | None = None) -> torch.Tensor:
        """As the engine does it, for the whole batch or some of it."""
        chosen = torch.arange(len(self.lengths)) if rows is None else torch.tensor(rows)
        query = self.query[chosen]
        out = query.new_full((len(chosen), query.shape[1], self.values.shape[-1]), torch.nan)
        places = self.req_to_token, self.pool_indices[chosen], self.lengths[chosen]
        for group in padded_requests(*places, query.dtype):
            out.index_copy_(0, group.rows, attend(query, self.keys, self.values, group, None))
        return out

    def one_by_one(self) -> torch.Tensor:
        """Written out, in double precision."""
        rows = []
        for query, place, length in zip(self.query.double(), self.pool_indices, self.lengths, strict=True):
            slots = self.req_to_token[place, :length].long()
            shared = self.query.shape[1] // self.keys.shape[1]
            keys = self.keys[slots].double().repeat_interleave(shared, dim=1)
            values = self.values[slots].double().repeat_interleave(shared, dim=1)
            shares = (torch.einsum("hd,thd->ht", query, keys) * query.shape[-1] ** -0.5).softmax(-1)
            rows.append(torch.einsum("ht,thd->hd", shares, values))
        return torch.stack(rows)


SHAPES = {
    "each head its own keys": (4, 4, 16, 16),
    "grouped queries": (9, 3, 64, 64),
    "one key head": (8, 1, 32, 32),
    "latent attention": (4, 1, 40, 32),
}
LENGTHS = [1, 2, 31, 32, 33, 64, 65, 90, 91, 255, 256]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_batch_of_any_lengths_gets_what_each_request_would(
    shape: tuple[int, int, int, int], dtype: torch.dtype, bound: float
) -> None:
    batch = Batch(LENGTHS, *shape, dtype)
    torch.testing.assert_close(batch.attended().double(), batch.one_by_one(), atol=bound, rtol=bound)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_a_request_gets_does_not_depend_on_the_others(
    data: st.DataObject, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    lengths = data.draw(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=12))
    batch = Batch(lengths, *shape, dtype)
    some = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    assert torch.equal(batch.attended(some), batch.attended()[some])


def test_a_large_batch_of_long_requests_is_copied_in_parts() -> None:
    batch = Batch([256] * (2 * MAX_GATHERED // 256 + 1), 1, 1, 2, 2, torch.float32)
    groups = padded_requests(batch.req_to_token, batch.pool_indices, batch.lengths, torch.float32)
    assert [len(group.slots) for group in groups] == [MAX_GATHERED, MAX_GATHERED, 256]
    torch.testing.assert_close(batch.attended().double(), batch.one_by_one(), atol=1e-5, rtol=1e-5)


class StockBackend:
    """As SGLang's, but that it notes what it is asked to decode by itself."""

    def __init__(self) -> None:
        self.decoded: list[dict[str, Any]] = []

    def init_forward_metadata(self, forward_batch: object) -> None:
        pass

    def _run_sdpa_forward_decode(self, *tensors: object, **options: Any) -> str:
        self.decoded.append(options)
        return "stock"


@pytest.fixture
def backend() -> Any:
    module = ModuleType("torch_native_backend")
    hooked = type("TorchNativeAttnBackend", (StockBackend,), {})
    module.TorchNativeAttnBackend = hooked  # type: ignore[attr-defined]
    _decode_in_batches(module)
    return hooked()


def decoded(backend: Any, batch: Batch, **options: Any) -> Any:
    out = torch.empty(*batch.query.shape[:2], batch.values.shape[-1])
    places = batch.req_to_token, batch.pool_indices, batch.lengths
    return backend._run_sdpa_forward_decode(batch.query, out, batch.keys, batch.values, *places, **options)


def test_each_batch_is_decoded_by_its_own_lengths_whenever_it_was_planned(backend: Any) -> None:
    """Fault: the plan of a later batch, or none, is there when a batch is decoded."""
    batches = [Batch(lengths, 4, 2, 16, 16, torch.float32) for lengths in ([5, 40, 70], [64, 3, 33])]
    for planned in (0, 1, 2):
        for _ in range(planned):
            backend.init_forward_metadata(None)
        for batch in [*batches, *batches]:
            assert torch.equal(decoded(backend, batch), batch.attended())


@pytest.mark.parametrize("options", [{"sliding_window_size": 16}, {"encoder_lens": torch.tensor([2, 3])}])
def test_what_is_not_attended_as_a_whole_is_left_to_sglang(backend: Any, options: dict[str, Any]) -> None:
    batch = Batch([5, 40], 4, 2, 16, 16, torch.float32)
    assert decoded(backend, batch, **options, is_cross_attn=True) == "stock"
    assert backend.decoded[0]["is_cross_attn"]
    assert backend.decoded[0]["sliding_window_size"] == options.get("sliding_window_size")
