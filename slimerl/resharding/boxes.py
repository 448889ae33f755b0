"""Boxes: half-open index ranges in every dimension of a tensor.

Flows in and out: plain integers. Invariant: `starts[i] <= stops[i]` in every dimension; boxes never change.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from operator import ge, gt, le, sub


@dataclass(frozen=True, slots=True)
class Box:
    """`Box((2, 0), (4, 8))` is rows 2 and 3, columns 0 to 7."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.stops):
            raise ValueError(f"a box needs as many starts as stops, not {self.starts} and {self.stops}")
        if (self.starts and min(self.starts) < 0) or any(map(gt, self.starts, self.stops)):
            raise ValueError(f"box {self.starts} to {self.stops} has a dimension that ends before it starts")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stops, self.starts))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of a tensor."""
        return tuple(map(slice, self.starts, self.stops))

    def range_in(self, dim: int, start: int, stop: int) -> "Box":
        """The same box with another range in one dimension."""
        starts, stops = list(self.starts), list(self.stops)
        starts[dim], stops[dim] = start, stop
        return Box(tuple(starts), tuple(stops))

    def intersect(self, other: "Box") -> "Box | None":
        """What both boxes have in common; None where that is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        if any(map(ge, starts, stops)):
            return None
        return Box(starts, stops)

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has all of the box."""
        return len(shape) == len(self.stops) and all(map(le, self.stops, shape))

    def relative_to(self, outer: "Box") -> "Box":
        """The same elements, counted from the corner of `outer`. Raises ValueError unless `outer` contains the box."""
        if self.intersect(outer) != self:
            raise ValueError(f"{self} does not lie in {outer}")
        return Box(
            tuple(map(sub, self.starts, outer.starts)),
            tuple(map(sub, self.stops, outer.starts)),
        )


def joined_by_rows(boxes: Iterable[Box]) -> list[Box]:
    """Boxes in the order of their starts; those that follow each other without a gap in the first dimension, and are
    equal in the others, become one."""
    joined: list[Box] = []
    for box in boxes:
        above = joined[-1] if joined else box
        if above.stops[0] == box.starts[0] and above.range_in(0, box.starts[0], box.stops[0]) == box:
            joined[-1] = above.range_in(0, above.starts[0], box.stops[0])
        else:
            joined.append(box)
    return joined
