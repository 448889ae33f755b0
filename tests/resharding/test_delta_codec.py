"""The codec of deltas: exact for every bit pattern of every dtype, short, and safe against other bytes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimerl.engine.inside.delta import DeltaError, apply, decode, encode, find_changes, integers_of, units
from slimerl.engine.inside.packed import _DTYPES
from slimerl.resharding.boxes import Box
from slimerl.resharding.patches import changes_in_box
from slimerl.resharding.sent_state import SentState

DTYPES = sorted(_DTYPES)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, random: np.random.Generator) -> torch.Tensor:
    """NaNs with payloads, infinities, negative zeros, subnormals; booleans that are neither 0 nor 1."""
    tensor = torch.zeros(shape, dtype=dtype)
    flat = units(tensor)
    flat[:] = np.frombuffer(random.bytes(tensor.nbytes), flat.dtype)
    return tensor


def bits(tensor: torch.Tensor) -> list[int]:
    return units(tensor).tolist()


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """Not `clone`, which turns every boolean but 0 into 1."""
    return part(tensor, Box.whole(tuple(tensor.shape)))


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    inside = torch.zeros(box.shape, dtype=tensor.dtype)
    integers_of(inside).copy_(integers_of(tensor)[box.slices])
    return inside


@st.composite
def states(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states of a tensor: nothing, a few elements, or all differ; by random bits or by one."""
    dtype = _DTYPES[draw(st.sampled_from(DTYPES))]
    shape = draw(shapes | st.sampled_from([(300, 7), (5000,)]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = random_bits(shape, dtype, random)
    new = copy(old)
    changed = random.random(old.numel()) < draw(st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]))
    flat = units(new)
    if draw(st.booleans()):
        flat[changed] = units(random_bits(shape, dtype, random))[changed]
    else:
        flat[changed] += random.choice([1, -1], int(changed.sum())).astype(flat.dtype)
    return old, new


@settings(deadline=None, max_examples=300)
@given(states())
def test_the_new_state_comes_back_bit_for_bit(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    old, new = pair
    data = encode(find_changes(units(old), units(new)))
    changes = decode(data, old.element_size(), old.numel())
    different = [at for at, (before, after) in enumerate(zip(bits(old), bits(new), strict=True)) if before != after]
    assert changes.positions.tolist() == different
    target = copy(old)
    apply(changes, target)
    assert bits(target) == bits(new)


@settings(deadline=None, max_examples=100)
@given(states(), st.integers(0, 3))
def test_a_target_may_be_a_part_of_a_larger_parameter(pair: tuple[torch.Tensor, torch.Tensor], beside: int) -> None:
    """As q in a fused matrix, or the columns of a rank: other strides, and the neighbours stay as they are."""
    old, new = pair
    changes = decode(encode(find_changes(units(old), units(new))), old.element_size(), old.numel())
    whole = torch.zeros([size + 2 * beside for size in old.shape], dtype=old.dtype)
    inside = whole[tuple(slice(beside, beside + size) for size in old.shape)]
    integers_of(inside).copy_(integers_of(old))
    apply(changes, inside)
    assert bits(inside) == bits(new)
    inside.zero_()
    assert not any(bits(whole)), "a neighbour was written to"


@settings(deadline=None, max_examples=200)
@given(states(), st.data())
def test_what_changes_in_a_box_is_the_delta_of_the_box(
    pair: tuple[torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    old, new = pair
    cuts = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in old.shape]
    box = Box(tuple(cut[0] for cut in cuts), tuple(cut[1] for cut in cuts))
    cut = changes_in_box(find_changes(units(old), units(new)), tuple(old.shape), box)
    alone = find_changes(units(part(old, box)), units(part(new, box)))
    assert cut.positions.tolist() == alone.positions.tolist()
    assert cut.steps.tolist() == alone.steps.tolist()


@settings(deadline=None, max_examples=100)
@given(st.lists(states(), min_size=1, max_size=4))
def test_the_sent_state_is_what_was_sent_last(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Through each way to note it: new, few changes, many changes, another shape or dtype under the old name."""
    state = SentState()
    for number, (old, new) in enumerate(pairs):
        state.take([("same", old), (f"own-{number}", old)])
        changes = state.take([("same", new), (f"own-{number}", new)])
        assert changes.keys() == {"same", f"own-{number}"}
        for name in changes:
            assert bits(state.tensors[name]) == bits(new)
            assert state.tensors[name].data_ptr() != new.data_ptr() or not new.numel()


def test_w2_a_state_that_is_being_changed_is_no_base_until_engines_are_proven_to_hold_it() -> None:
    """Fault: a sync that ends after the state was changed and before engines were. The next one must not be a delta."""
    state = SentState()
    state.commit([{"version": 1, "digest": 5}])
    assert state.begin() == [{"version": 1, "digest": 5}]
    state.take([("weight", torch.ones(3))])
    assert state.begin() is None
    state.commit([{"version": 2, "digest": 6}])
    assert state.begin() == [{"version": 2, "digest": 6}]


def test_negative_zero_and_the_payload_of_a_nan_are_changes() -> None:
    """Fault: a comparison of values would see no change in the first and one in an unchanged NaN."""
    old = torch.tensor([0x0000, 0x7FC1, 0x7FC1, 0x3F80], dtype=torch.uint16).view(torch.bfloat16)
    new = torch.tensor([0x8000, 0x7FC1, 0xFFC2, 0x3F80], dtype=torch.uint16).view(torch.bfloat16)
    changes = find_changes(units(old), units(new))
    assert changes.positions.tolist() == [0, 2]


def test_p6_a_hundredth_of_bf16_elements_moved_by_one_takes_a_hundredth_of_the_bytes() -> None:
    """The entropy of the places and signs alone is 1/176 of the bytes."""
    random = np.random.default_rng(3)
    old = units(torch.from_numpy(random.standard_normal(1 << 21, np.float32)).to(torch.bfloat16))
    new = old.copy()
    changed = random.random(len(old)) < 0.01
    new[changed] += random.choice([1, -1], int(changed.sum())).astype(np.uint16)
    assert new.nbytes / len(encode(find_changes(old, new))) > 170


def test_places_far_apart_and_longer_than_any_short_gap() -> None:
    old = np.zeros(1 << 25, np.uint8)
    new = old.copy()
    new[[0, 254, 509, 510, 1021, 70_000, (1 << 25) - 1]] = 255
    changes = decode(encode(find_changes(old, new)), 1, len(old))
    assert changes.positions.tolist() == np.flatnonzero(new).tolist()


@settings(deadline=None, max_examples=200)
@given(states(), st.data())
def test_torn_bytes_are_an_error(pair: tuple[torch.Tensor, torch.Tensor], data: st.DataObject) -> None:
    """Fault: the end is missing, or something follows it."""
    old, new = pair
    whole = encode(find_changes(units(old), units(new)))
    torn = whole[: data.draw(st.integers(0, len(whole) - 1))] if data.draw(st.booleans()) else whole + b"\0"
    with pytest.raises(DeltaError):
        decode(torn, old.element_size(), old.numel())


@settings(deadline=None, max_examples=200)
@given(states(), st.data())
def test_flipped_bytes_never_write_outside_of_the_tensor(
    pair: tuple[torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    """Fault: a byte is another one. (That it is, the patch's SHA-256 says; here the places must stay inside.)"""
    old, new = pair
    changed = bytearray(encode(find_changes(units(old), units(new))))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(bytes(changed), old.element_size(), old.numel())
    except DeltaError:
        return
    assert all(0 <= position < old.numel() for position in found.positions.tolist())


def test_a_delta_of_another_size_is_refused() -> None:
    old, new = np.zeros(100, np.uint16), np.zeros(100, np.uint16)
    new[99] = 1
    data = encode(find_changes(old, new))
    with pytest.raises(DeltaError, match="a position lies outside"):
        decode(data, 2, 99)
    with pytest.raises(DeltaError, match="cannot be compared"):
        find_changes(old, new[:99])
