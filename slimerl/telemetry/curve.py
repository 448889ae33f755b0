"""A curve in plain text, for terminals and READMEs."""

from collections.abc import Sequence

ROWS = 10


def text_curve(steps: Sequence[int], values: Sequence[float], width: int = 60, rows: int = ROWS) -> str:
    """A dot chart of finite values over steps; those that all lie between 0 and 1 are drawn as shares.

    Each column is the mean of the steps that fall into it. Raises ValueError without values.
    """
    if not values:
        raise ValueError("there is nothing to draw: no values were recorded")
    columns = _columns(steps, values, width)
    low, high = (0.0, 1.0) if all(0 <= value <= 1 for value in values) else (min(values), max(values))
    form, reach = ("{:.0%}", 1.0) if (low, high) == (0.0, 1.0) else ("{:.3g}", high - low or 1.0)
    labels = {row: form.format(low + reach * row / rows) for row in range(0, rows + 1, rows // 5)}
    margin = max(map(len, labels.values()))
    lines = []
    for row in range(rows, -1, -1):
        at = [None if value is None else round((value - low) / reach * rows) for value in columns]
        lines.append(f"{labels.get(row, ''):>{margin}} │{''.join('•' if each == row else ' ' for each in at)}".rstrip())
    lines.append(" " * margin + " └" + "─" * len(columns))
    first, last = f"step {steps[0]}", str(steps[-1]) if len(steps) > 1 else ""
    lines.append(f"{' ' * (margin + 2)}{first}{last:>{max(1, len(columns) - len(first))}}".rstrip())
    return "\n".join(lines)


def _columns(steps: Sequence[int], values: Sequence[float], width: int) -> list[float | None]:
    span = max(1, steps[-1] - steps[0])
    count = min(width, span + 1)
    sums: list[list[float]] = [[] for _ in range(count)]
    for step, value in zip(steps, values, strict=True):
        sums[min(count - 1, (step - steps[0]) * count // (span + 1))].append(value)
    return [sum(each) / len(each) if each else None for each in sums]
