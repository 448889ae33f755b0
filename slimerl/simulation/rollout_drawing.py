"""Engine occupancy over time, as text and as a picture.

Flows in: each engine's (time, running, waiting) changes. Flows out: rows of characters, or an SVG (no library needed).
"""

from collections.abc import Mapping, Sequence
from html import escape

Changes = Sequence[tuple[float, int, int]]

_SHADES = " .:-=+*#%@"
_ROW, _LEFT, _WIDTH, _TOP = 34, 90, 900, 40


def occupancy_text(occupancy: Mapping[str, Changes], slots: int, until: float, columns: int = 80) -> list[str]:
    """A row per engine: the darker, the more slots decode; `!` where requests wait in its queue."""
    rows = []
    for engine, changes in occupancy.items():
        cells = []
        for running, waiting in _sampled(changes, until, columns):
            shade = _SHADES[min(len(_SHADES) - 1, round(running / slots * (len(_SHADES) - 1)))]
            cells.append("!" if waiting > 0 else shade)
        rows.append(f"{engine:>10} |{''.join(cells)}|")
    rows.append(f"{'':>10}  0 s{f'{until:.0f} s':>{columns - 3}}")
    return rows


def occupancy_svg(title: str, occupancy: Mapping[str, Changes], slots: int, until: float) -> str:
    """Per engine the running requests (filled) and the waiting ones (line above), over time."""
    height = _TOP + _ROW * len(occupancy) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for row, (engine, changes) in enumerate(occupancy.items()):
        base = _TOP + _ROW * (row + 1) - 4
        samples = _sampled(changes, until, _WIDTH)
        running = [(x, min(1.0, run / slots)) for x, (run, _) in enumerate(samples)]
        waiting = [(x, min(1.0, (run + wait) / slots)) for x, (run, wait) in enumerate(samples)]
        parts.append(f'<text x="8" y="{base - 6}">{escape(engine)}</text>')
        parts.append(
            f'<polygon fill="#4878a8" points="{_LEFT},{base} {_points(running, base)} {_LEFT + _WIDTH},{base}"/>'
        )
        parts.append(f'<polyline fill="none" stroke="#d08030" points="{_points(waiting, base)}"/>')
    parts.append(f'<text x="{_LEFT}" y="{height - 8}">0 s</text>')
    parts.append(f'<text x="{_LEFT + _WIDTH - 40}" y="{height - 8}">{until:.0f} s</text></svg>')
    return "\n".join(parts)


def busy_share(occupancy: Mapping[str, Changes], slots: int, until: float) -> float:
    """Share of all decode slots that were in use up to `until`."""
    used = 0.0
    for changes in occupancy.values():
        ends = [time for time, _, _ in changes[1:]] + [until]
        for (start, running, _), end in zip(changes, ends, strict=True):
            used += running * max(0.0, min(end, until) - start)
    return used / (slots * until * len(occupancy))


def _sampled(changes: Changes, until: float, columns: int) -> list[tuple[int, int]]:
    """(running, waiting) in the middle of each column."""
    sampled, position = [], 0
    for column in range(columns):
        time = (column + 0.5) / columns * until
        while position + 1 < len(changes) and changes[position + 1][0] <= time:
            position += 1
        sampled.append(changes[position][1:] if changes[position][0] <= time else (0, 0))
    return sampled


def _points(curve: Sequence[tuple[int, float]], base: float) -> str:
    """Of a polygon: only where the curve changes."""
    kept = [
        (x, y)
        for n, (x, y) in enumerate(curve)
        if n in (0, len(curve) - 1) or y != curve[n - 1][1] or y != curve[n + 1][1]
    ]
    return " ".join(f"{_LEFT + x},{base - y * (_ROW - 10):.1f}" for x, y in kept)
