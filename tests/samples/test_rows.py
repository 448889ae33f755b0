"""Rows of a data set: what is wrong with them is said by file, line and reason."""

import pytest

from slimerl.rollout.prompts import scan_file
from slimerl.samples.rows import SHOWN_FAULTS, DataError, Row, parse_rows, scan_rows

GOOD = '{"id": "a", "prompt": "1+1=", "answer": "2"}'


def test_good_rows_are_read_and_further_keys_ignored():
    lines = [GOOD, "", '{"id": 7, "prompt": "2+2=", "answer": 4, "level": "easy"}']
    assert parse_rows(lines, "data.jsonl") == [Row("a", "1+1=", "2", 1), Row("7", "2+2=", "4", 3)]


def test_the_target_may_be_a_response():
    assert parse_rows(['{"id": "a", "prompt": "p", "response": "r"}'], "d", target="response")[0].target == "r"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not valid JSON (column 2): Expecting property name enclosed in double quotes"),
        ('{"id": "b"\n', "not valid JSON (column 11): Expecting ',' delimiter"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
        ('{"id": "b", "id": "c", "prompt": "p", "answer": "2"}', "key 'id' stands twice"),
        ('{"id": "b", "prompt": "\\ud83d", "answer": "2"}', "'prompt' has half of a surrogate pair, which is no text"),
        ("[1]", "a row is an object, found list"),
        ('{"id": "b", "answer": "2"}', "'prompt' is missing"),
        ('{"id": "b", "prompt": "p"}', "'answer' is missing"),
        ('{"prompt": "p", "answer": "2"}', "'id' is missing"),
        ('{"id": "b", "prompt": "", "answer": "2"}', "'prompt' is empty"),
        ('{"id": "b", "prompt": "  \\n", "answer": "2"}', "'prompt' is empty"),
        ('{"id": "b", "prompt": "p", "answer": ""}', "'answer' is empty"),
        ('{"id": "b", "prompt": ["p"], "answer": "2"}', "'prompt' must be text, found list"),
        ('{"id": "b", "prompt": 5, "answer": "2"}', "'prompt' must be text, found int"),
        ('{"id": "b", "prompt": "p", "answer": true}', "'answer' must be text, found bool"),
        ('{"id": "b", "prompt": "p", "answer": NaN}', "'answer' is nan, which is no finite number; write a number, or"),
        ('{"id": 1e999, "prompt": "p", "answer": "2"}', "'id' is inf, which is no finite number"),
        (f'{{"id": "b", "prompt": "p", "answer": {"9" * 5000}}}', "a number cannot be read: Exceeds the limit"),
        ('{"id": "a", "prompt": "p", "answer": "2"}', "id 'a' stands already in line 1"),
    ],
)
def test_r3_a_bad_row_is_refused_with_file_line_and_reason(line, reason):
    with pytest.raises(DataError) as caught:
        parse_rows([GOOD, "", line], "data.jsonl")
    assert str(caught.value).startswith(f"data.jsonl:3: {reason}")


def test_r3_bytes_that_are_no_text_are_told_by_line(tmp_path):
    """Injected: a byte of another encoding behind more rows than a reader takes at once."""
    file = tmp_path / "data.jsonl"
    rows = [b'{"id": "%d", "prompt": "p", "answer": "2"}\n' % number for number in range(500)]
    file.write_bytes(b"".join([*rows, b'{"id": "\xff"}\n']))
    assert scan_file(file) == ([], [f"{file}:501: not UTF-8 text: invalid start byte at byte 9 of the line"])


def test_r3_an_id_of_several_lines_is_told_on_one():
    row = '{"id": "a\\nb", "prompt": "p", "answer": "2"}'
    assert scan_rows([row, row], "d")[1] == [r"d:2: id 'a\nb' stands already in line 1"]


def test_r3_an_empty_data_set_is_refused():
    with pytest.raises(DataError, match=r"data\.jsonl: no rows"):
        parse_rows(["", "\n"], "data.jsonl")


def test_r3_all_faults_are_told_at_once_up_to_a_bound():
    with pytest.raises(DataError) as caught:
        parse_rows(["{"] * (SHOWN_FAULTS + 5), "d")
    lines = str(caught.value).splitlines()
    assert len(lines) == SHOWN_FAULTS + 1
    assert lines[-1] == "… and 5 more faults"


def test_r3_the_good_rows_between_bad_ones_are_read_too():
    rows, faults = scan_rows(["{", GOOD, "[]"], "d")
    assert [row.row_id for row in rows] == ["a"]
    assert [fault.split(" ")[0] for fault in faults] == ["d:1:", "d:3:"]
