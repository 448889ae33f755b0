"""The calculator: arithmetic with numbers alone. Pure.

Flows in: an expression, `2 * (3 + 4)`. Flows out: its value as text, whole where it is.
Invariant: whatever the expression, it takes microseconds and a few kilobytes: it is walked, not evaluated as a program,
and no number gets longer than `MAX_BITS`.
"""

import ast
import math
from fractions import Fraction

from slimerl.environments.calls import ToolDescription, ToolMisused

DESCRIPTION = ToolDescription(
    "calc", "expression", "Evaluates an arithmetic expression: numbers, parentheses, + - * / // % and ** for powers."
)
MAX_CHARACTERS = 1000
MAX_BITS = 4096
_DIGITS = 12
"""Of a value that is not whole."""

Number = Fraction | float


def calculate(expression: str) -> str:
    """Raises ToolMisused."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolMisused("too_large", f"an expression has at most {MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolMisused("syntax", "this is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolMisused("arithmetic", "division by zero") from None
    except OverflowError:
        raise _too_large() from None
    return _text(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=bool() | complex()):
            pass
        case ast.Constant(value=int(number)):
            return _bounded(Fraction(number))
        case ast.Constant(value=float(number)):
            return _bounded(Fraction(repr(number)) if math.isfinite(number) else number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            return _bounded(_combined(_value(left), operator, _value(right)))
    raise ToolMisused("syntax", "only numbers, parentheses, + - * / // % and ** are known")


def _combined(left: Number, operator: ast.operator, right: Number) -> Number:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return Fraction(left // right)
        case ast.Mod():
            return left % right
        case ast.Pow():
            return _power(left, right)
    raise ToolMisused("syntax", "only + - * / // % and ** are known; a power is written **")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, float) or isinstance(exponent, float) or exponent.denominator != 1:
        if base < 0:
            raise ToolMisused("arithmetic", "a root of a negative number")
        return float(base) ** float(exponent)
    longest = max(base.numerator.bit_length(), base.denominator.bit_length())
    # Before, not after: this is where numbers grow without bound. Powers of 0, 1 and -1 do not.
    if longest > 1 and abs(exponent.numerator) * longest > 2 * MAX_BITS:
        raise _too_large()
    if longest <= 1:
        exponent = Fraction(exponent.numerator % 2 or (2 if exponent else 0)) * (-1 if exponent < 0 else 1)
    return Fraction(base**exponent)


def _bounded(value: Number) -> Number:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _too_large()
    elif max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _too_large()
    return value


def _too_large() -> ToolMisused:
    return ToolMisused("too_large", "the numbers get too large")


def _text(value: Number) -> str:
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{_DIGITS}g}"
    except OverflowError:
        raise _too_large() from None
