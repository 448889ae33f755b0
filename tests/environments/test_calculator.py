"""The calculator is right, and no expression can hold it up."""

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimerl.environments.calculator import calculate
from slimerl.environments.calls import ToolMisused


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+34", "46"),
        (" 2 * (3 - -4) ", "14"),
        ("7/2", "3.5"),
        ("6/3", "2"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),
        ("7//2", "3"),
        ("-7 % 3", "2"),
        ("2**100", str(2**100)),
        ("2**-2", "0.25"),
        ("2**0.5", "1.41421356237"),
        ("(-1)**(10**30+1)", "-1"),
        ("1**(10**300)", "1"),
        ("0**0", "1"),
        ("1e3+1", "1001"),
    ],
)
def test_values(expression, value):
    assert calculate(expression) == value


NUMBERS = st.integers(-999, 999).map(lambda number: f"({number})")
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(lambda p: f"({p[0]}{p[1]}{p[2]})"),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_arithmetic_is_exact(expression):
    try:
        expected = _exact(expression)
    except ZeroDivisionError:
        with pytest.raises(ToolMisused, match="division by zero"):
            calculate(expression)
        return
    assert calculate(expression) == (str(expected) if expected.denominator == 1 else f"{float(expected):.12g}")


def _exact(expression: str) -> Fraction:
    return eval(re.sub(r"\d+", lambda found: f"F({found[0]})", expression), {"F": Fraction})


HOSTILE = [
    "9**9**9**9",
    "9**99999999",
    "(10**1000)*(10**1000)",
    "2**(-99999999)",
    "1e308*1e308*1e308*1e308*1e308",
    "1e999",
    "(" * 5000 + "1" + ")" * 5000,
    "(" * 400 + "1" + ")" * 400,
    "1" * 100_000,
    "__import__('os').system('true')",
    "[1]*10**9",
    "'a'*10**9",
    "(lambda: 1)()",
    "x",
    "1 if 1 else 2",
    "True",
    "1j",
    "",
    "1+",
    "\x00",
    "(-8)**0.5",
    "5%0",
    "1<<99999999999",
    "1.5**1e300",
]


@pytest.mark.parametrize("expression", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_arithmetic_or_too_large_is_told_at_once(expression):
    begun = time.monotonic()
    with pytest.raises(ToolMisused) as caught:
        calculate(expression)
    assert caught.value.failure in ("syntax", "too_large", "arithmetic")
    assert time.monotonic() - begun < 0.2
