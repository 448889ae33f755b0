"""Ids as they are written: the same ids, whoever reads them, and nothing else."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimerl.engine.protocol import written_body
from slimerl.rollout.prefix_index import hash_blocks
from slimerl.samples.written_ids import NotPlain, WrittenIds, canonical, read, written

IDS = st.lists(st.one_of(st.integers(0, 30), st.integers(0, (1 << 31) - 1)), max_size=200)


@given(IDS, st.sampled_from([(",", ":"), (", ", ": ")]))
def test_ids_are_read_as_json_has_them_whatever_stands_between_them(ids, separators):
    inside = json.dumps(ids, separators=separators)[1:-1].encode()
    if ids:
        assert canonical(inside) == written(ids)
        assert list(read(canonical(inside))) == ids
    assert read(written(ids)).tolist() == ids


@given(IDS, IDS)
def test_one_list_begins_with_another_where_its_text_does(one, other):
    assert written(one).startswith(written(other)) == (one[: len(other)] == other)
    assert written(one + other).startswith(written(one))
    assert written(one + other)[len(written(one)) :] == written(other)


@given(st.text("0123456789,- .e[]", max_size=12))
def test_what_is_not_ids_alone_is_refused(inside):
    try:
        expected = json.loads(f"[{inside}]")
    except ValueError:
        expected = None
    plain = expected and all(type(each) is int and 0 <= each < 1 << 31 for each in expected) and "-" not in inside
    try:
        found = read(canonical(inside.encode())).tolist()
    except NotPlain:
        # spaces in other places than behind commas are left to who reads everything
        assert not plain or " " in inside
    else:
        assert found == expected


@pytest.mark.parametrize("inside", ["", ",", "1,,2", "1,", ",1", "01", "-1", "1.0", "1e2", str(1 << 31), "[1]", "true"])
def test_nothing_that_json_would_not_read_as_ids_is_taken_for_some(inside):
    with pytest.raises(NotPlain):
        read(canonical(inside.encode()))


@given(IDS.filter(bool), st.slices(200))
def test_written_ids_are_a_sequence_and_a_piece_of_json(ids, part):
    whole = WrittenIds(written(ids), read(written(ids)))
    assert (len(whole), list(whole), tuple(whole)) == (len(ids), ids, tuple(ids))
    assert whole[part] == tuple(ids[part])
    assert whole[-1] == ids[-1]
    body = {"rid": '"input_ids":[]', "input_ids": whole, "n": 1}
    assert msgspec.json.decode(b"".join(written_body(body))) == {**body, "input_ids": ids}
    assert hash_blocks(whole) == hash_blocks(tuple(ids))
