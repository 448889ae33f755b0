"""Rows of a JSONL data set, checked as a whole before a run starts. Pure: takes lines, reads no file.

Flows in: lines `{"id": …, "prompt": "…", "answer": "…"}` (for SFT `"response"`); further keys are allowed and ignored.
Flows out: `Row`s, or one `DataError` that lists the faults by file and line.
Invariant: ids are unique and no text is empty.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN_FAULTS = 20


class DataError(ValueError):
    """The data set cannot be used. One line per fault: file, line, reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """`target` is what the prompt is to be answered with: the right answer, or the response to imitate."""

    row_id: str
    prompt: str
    target: str
    line: int


def parse_rows(lines: Iterable[str], source: str, target: str = "answer") -> list[Row]:
    """Check every line.

    Args:
        source: name of the file in errors.
        target: key of the row's target, `answer` or `response`.

    Raises:
        DataError: malformed rows, ids that stand twice, empty texts, or no row at all.
    """
    rows, faults = scan_rows(lines, source, target)
    raise_faults(faults)
    return rows


def scan_rows(lines: Iterable[str], source: str, target: str = "answer") -> tuple[list[Row], list[str]]:
    """As `parse_rows`, but the good rows and the faults of the others, one line each."""
    rows: dict[str, Row] = {}
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _parse_row(line.rstrip("\r\n"), number, target)
        if isinstance(row, str):
            faults.append(f"{source}:{number}: {row}")
        elif row.row_id in rows:
            faults.append(f"{source}:{number}: id {row.row_id!r} stands already in line {rows[row.row_id].line}")
        else:
            rows[row.row_id] = row
    if not rows and not faults:
        faults.append(f"{source}: no rows")
    return list(rows.values()), faults


def not_utf8(lines: Iterable[bytes], source: str) -> str:
    """The fault of the first line that is no UTF-8: a decoder tells the place only within what it read at once."""
    for number, line in enumerate(lines, 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            return f"{source}:{number}: not UTF-8 text: {error.reason} at byte {error.start + 1} of the line"
    return f"{source}: not UTF-8 text"


def raise_faults(faults: Sequence[str]) -> None:
    """Raise DataError with the first `SHOWN_FAULTS` faults, if there are any."""
    if faults:
        raise DataError("\n".join(shown_faults(faults)))


def shown_faults(faults: Sequence[str]) -> list[str]:
    """The first `SHOWN_FAULTS` of them, and how many more there are."""
    more = [f"… and {len(faults) - SHOWN_FAULTS} more faults"] if len(faults) > SHOWN_FAULTS else []
    return [*faults[:SHOWN_FAULTS], *more]


def _parse_row(line: str, number: int, target: str) -> Row | str:
    """The row, or what is wrong with it."""
    try:
        tree: Any = json.loads(line, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as error:
        return f"not valid JSON (column {error.colno}): {error.msg}"
    except RecursionError:
        return "not valid JSON: nested too deeply"
    except _DoubleKey as error:
        return f"key '{error}' stands twice"
    except ValueError as error:
        return f"a number cannot be read: {error}"
    if not isinstance(tree, dict):
        return f"a row is an object, found {type(tree).__name__}"
    texts = {}
    for key in ("id", "prompt", target):
        value = tree.get(key)
        # Ids and answers are often written as numbers; they mean the same as text. True and False do not.
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "prompt":
            if not abs(value) < math.inf:
                return f"'{key}' is {value}, which is no finite number; write a number, or text"
            value = str(value)
        if value is None:
            return f"'{key}' is missing"
        if not isinstance(value, str):
            return f"'{key}' must be text, found {type(value).__name__}"
        if not value.strip():
            return f"'{key}' is empty"
        if any("\ud800" <= character <= "\udfff" for character in value):
            return f"'{key}' has half of a surrogate pair, which is no text"
        texts[key] = value
    return Row(texts["id"], texts["prompt"], texts[target], number)


class _DoubleKey(ValueError):
    """A key stands twice in one object; Python would let the last one win."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [key for key, _ in pairs]
        raise _DoubleKey(next(key for key in names if names.count(key) > 1))
    return tree
