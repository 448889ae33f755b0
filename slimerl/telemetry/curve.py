"""A curve in plain text, for terminals and READMEs."""

from collections.abc import Sequence

ROWS = 10


def text_curve(steps: Sequence[int], values: Sequence[float], width: int = 60, rows: int = ROWS) -> str:
    """A dot chart of values between 0 and 1 over steps.

    Each column is the mean of the steps that fall into it. Raises ValueError without values.
    """
    if not values:
        raise ValueError("there is nothing to draw: no values were recorded")
    columns = _columns(steps, values, width)
    lines = []
    for row in range(rows, -1, -1):
        label = f"{row / rows:4.0%}" if row % (rows // 5) == 0 else "    "
        marks = "".join("•" if value is not None and round(value * rows) == row else " " for value in columns)
        lines.append(f"{label} │{marks}".rstrip())
    lines.append("     └" + "─" * len(columns))
    first, last = f"step {steps[0]}", str(steps[-1])
    lines.append(f"      {first}{last:>{max(1, len(columns) - len(first))}}")
    return "\n".join(lines)


def _columns(steps: Sequence[int], values: Sequence[float], width: int) -> list[float | None]:
    span = max(1, steps[-1] - steps[0])
    count = min(width, span + 1)
    sums: list[list[float]] = [[] for _ in range(count)]
    for step, value in zip(steps, values, strict=True):
        sums[min(count - 1, (step - steps[0]) * count // (span + 1))].append(value)
    return [sum(each) / len(each) if each else None for each in sums]
