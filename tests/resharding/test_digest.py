"""The digest: the same for every sharding, another one for every fault that a transfer can make."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimerl.engine.inside import digest as digest_module
from slimerl.engine.inside.digest import DigestError, digest, granule

EXAMPLES = settings(max_examples=80, deadline=None, derandomize=True)
MODULUS = 1 << 64
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def whole(tensor: torch.Tensor, name: str = "w", words: int | None = None) -> int:
    words = granule(tensor.shape, tensor.element_size()) if words is None else words
    return digest(tensor, name, tensor.shape, ((0,) * tensor.dim(), tuple(tensor.shape)), words)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[int]]]:
    """A tensor of one to three dimensions and the sorted cuts, ends included, of each of them."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    tensor = random_tensor(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    return tensor, cuts


@EXAMPLES
@given(partitions())
def test_digests_of_a_partition_add_up_to_the_digest_of_the_whole(case):
    tensor, cuts = case
    words = granule(tensor.shape, tensor.element_size(), cuts[-1])
    total = 0
    for bounds in itertools.product(*(itertools.pairwise(along) for along in cuts)):
        starts, stops = zip(*bounds, strict=True)
        view = tensor[tuple(map(slice, starts, stops))]
        total += digest(view, "w", tensor.shape, (starts, stops), words)
    assert total % MODULUS == whole(tensor, words=words)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_shows_the_sign_bits_included(dtype):
    tensor = random_tensor((3, 16), dtype, 1)
    found = {whole(tensor)}
    raw = tensor.view(torch.uint8)
    for row, byte, bit in itertools.product(range(3), range(raw.shape[1]), range(8)):
        raw[row, byte] ^= 1 << bit
        found.add(whole(tensor))
        raw[row, byte] ^= 1 << bit
    assert len(found) == 1 + raw.numel() * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flipped_signs_do_not_cancel_in_pairs_or_all_together(dtype):
    """Fault: every sign flipped. Without the mixing, 2^63 times an even number of odd weights is zero."""
    tensor = random_tensor((4, 16), dtype, 2)
    found = {whole(tensor), whole(-tensor)}
    flat = tensor.view(-1)
    for one, other in itertools.combinations(range(flat.numel()), 2):
        flat[[one, other]] = -flat[[one, other]]
        found.add(whole(tensor))
        flat[[one, other]] = -flat[[one, other]]
    assert len(found) == 2 + 64 * 63 // 2


def test_swapped_elements_rows_columns_and_a_transpose_show():
    tensor = random_tensor((8, 8), torch.float32, 3)
    found = {whole(tensor), whole(tensor.T)}
    for one, other in itertools.combinations(range(8), 2):
        order = list(range(8))
        order[one], order[other] = other, one
        found |= {whole(tensor[order]), whole(tensor[:, order])}
    flat = tensor.reshape(-1)
    for one, other in itertools.combinations(range(64), 2):
        order = list(range(64))
        order[one], order[other] = other, one
        found.add(whole(flat[order].view(8, 8)))
    assert len(found) == 2 + 2 * 28 + 64 * 63 // 2


def test_the_same_bytes_under_another_name_or_at_another_place_have_another_digest():
    tensor = torch.ones(4, 8)
    box_of = {start: ((start, 0), (start + 4, 8)) for start in (0, 4)}
    found = {digest(tensor, name, (8, 8), box_of[start], 8) for name in ("q", "k") for start in (0, 4)}
    assert len(found) == 4


def test_zeros_have_digest_zero():
    assert whole(torch.zeros(5, 6)) == 0


def test_strides_offsets_and_dimensions_of_one_make_no_difference():
    tensor = random_tensor((6, 12), torch.bfloat16, 4)
    words = granule(tensor.shape, 2, (4, 8))
    box = ((1, 4), (5, 8))
    expected = digest(tensor[1:5, 4:8].contiguous(), "w", tensor.shape, box, words)
    assert digest(tensor[1:5, 4:8], "w", tensor.shape, box, words) == expected
    assert digest(tensor.T.contiguous().T[1:5, 4:8], "w", tensor.shape, box, words) == expected
    odd_offset = torch.cat([torch.zeros(1, dtype=torch.bfloat16), tensor[1:5, 4:8].reshape(-1)])[1:].view(4, 4)
    assert digest(odd_offset, "w", tensor.shape, box, words) == expected


def test_a_scalar_has_a_digest():
    assert whole(torch.tensor(2.0)) != whole(torch.tensor(-2.0))


def test_chunks_are_not_seen_in_the_result(monkeypatch):
    tensor = random_tensor((37, 24), torch.float32, 5)
    expected = whole(tensor)
    for words in (1, 5, 12, 50):
        monkeypatch.setitem(digest_module._CHUNK_WORDS, "cpu", words)
        assert whole(tensor) == expected


def test_the_way_of_a_gpu_gives_the_same_digest(monkeypatch):
    """CUDA has no integer matrix product: there it is a multiplication and a sum."""
    tensor = random_tensor((9, 16), torch.bfloat16, 6)
    expected = whole(tensor)
    monkeypatch.setattr(digest_module, "_times", digest_module._times_by_sum)
    assert whole(tensor) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_gives_the_same_digest():
    for dtype, shape in itertools.product(DTYPES, [(3000, 4096), (513, 1001), (77,)]):
        tensor = random_tensor(shape, dtype, 7)
        assert whole(tensor.cuda()) == whole(tensor)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.int64, (3, 2)), (torch.bfloat16, (3, 7)), (torch.bfloat16, (2, 3, 4))], ids=str
)
def test_the_digest_is_the_documented_sum(dtype, shape):
    """The formula in the module's docstring, in Python integers."""

    def splitmix(seed: int, index: int) -> int:
        value = (seed + (index + 1) * 0x9E3779B97F4A7C15) % MODULUS
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
        value = (value ^ value >> 27) * 0x94D049BB133111EB % MODULUS
        return (value ^ value >> 31) | 1

    def mix(word: int) -> int:
        word = (word ^ word >> 32) * 0x9E3779B97F4A7C15 % MODULUS
        return word ^ word >> 32

    tensor = random_tensor(shape, dtype, 8)
    words = granule(shape, dtype.itemsize)
    total = 0
    for row, elements in enumerate(tensor.view(-1, shape[-1])):
        raw = bytes(elements.view(torch.uint8).tolist())
        for column in range(len(raw) // words):
            word = int.from_bytes(raw[column * words : (column + 1) * words], "little")
            weight = splitmix(digest_module._ROW_SEED, row) * splitmix(digest_module._COLUMN_SEED, column)
            total += mix(word) * weight
    assert whole(tensor, "name") == total * digest_module._name_key("name") % MODULUS


def test_a_word_is_as_wide_as_every_cut_allows():
    assert granule((10, 64), 2, (16, 32)) == 8
    assert granule((10, 6), 2) == 4
    assert granule((10, 64), 2, (1,)) == 2
    assert granule((64,), 1, (3,)) == 1
    assert granule((), 4) == 4
    assert granule((3, 5), 8) == 8


@pytest.mark.parametrize(
    ("view", "box", "words", "message"),
    [
        (torch.ones(2, 4), ((0, 1), (2, 5)), 8, "whole words"),
        (torch.ones(2, 4), ((7, 0), (9, 4)), 4, "cannot be"),
        (torch.ones(2, 4), ((0, 0), (2, 3)), 4, "cannot be"),
        (torch.ones(3, 8), ((-1, 0), (2, 8)), 4, "cannot be"),
        (torch.ones(4), ((0,), (4,)), 4, "cannot be"),
    ],
)
def test_a_view_that_is_not_the_named_box_is_refused(view, box, words, message):
    with pytest.raises(DigestError, match=message):
        digest(view, "w", (8, 8), box, words)
