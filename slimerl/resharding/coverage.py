"""Checks of placements before any byte moves: nothing left out, nothing written twice, every key known.

Flows in: placements and shapes. Flows out: nothing, or a `CoverageError` that names the tensor or parameter.
"""

from collections.abc import Iterable, Mapping, Sequence

from slimerl.resharding.boxes import Box
from slimerl.resharding.tensors import LogicalTensor, Placement

_NAMED = 5


class CoverageError(ValueError):
    """Placements leave something out, write it twice, or name what does not exist."""


def some_names(names: Iterable[str]) -> str:
    """The first few of `names`, sorted, for a message."""
    names = sorted(names)
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def find_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two boxes with a common element, or None; boxes are swept along the first dimension."""
    active: list[Box] = []
    for box in sorted((box for box in boxes if box.numel), key=lambda box: box.starts):
        if not box.starts:
            active = [other for other in active if other.numel]
        else:
            active = [other for other in active if other.stops[0] > box.starts[0]]
        for other in active:
            if other.intersect(box) is not None:
                return other, box
        active.append(box)
    return None


def check_tiling(what: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raises CoverageError unless every element of `shape` lies in exactly one of `boxes`."""
    for box in boxes:
        if not box.inside(shape):
            raise CoverageError(f"{what}: {box} does not lie in its shape {shape}")
    overlap = find_overlap(boxes)
    if overlap is not None:
        raise CoverageError(f"{what}: {overlap[0]} and {overlap[1]} have elements in common")
    covered, wanted = sum(box.numel for box in boxes), Box.whole(shape).numel
    if covered != wanted:
        raise CoverageError(f"{what}: placements cover {covered} of its {wanted} elements (shape {shape})")


def check_parameters(placements: Sequence[Placement], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """One rank: the placements tile all parameters in `shapes` and name no other. Raises CoverageError."""
    placed: dict[str, list[Box]] = {}
    for placement in placements:
        placed.setdefault(placement.parameter, []).append(placement.at)
    if missing := placed.keys() - shapes.keys():
        raise CoverageError(f"the table places parameters that the model does not have: {some_names(missing)}")
    if unknown := shapes.keys() - placed.keys():
        raise CoverageError(f"the model has parameters that the table does not place: {some_names(unknown)}")
    for name, boxes in placed.items():
        check_tiling(name, tuple(shapes[name]), boxes)


def owned_placements(ranks: Sequence[Sequence[Placement]], tensors: Iterable[LogicalTensor]) -> list[list[Placement]]:
    """For each rank, the placements that it owns, so that every logical element has exactly one owner.

    A box that several ranks hold (replicated norms, the copy of a tied embedding) belongs to the lowest of them.

    Raises:
        CoverageError: an element has no rank, or ranks hold boxes that overlap without being equal.
    """
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    held: dict[str, dict[int, None]] = {name: {} for name in shapes}
    numbers = _BoxNumbers()
    owned: list[list[Placement]] = []
    for placements in ranks:
        mine = []
        for placement in placements:
            if placement.is_padding:
                continue
            of_tensor = held.get(placement.tensor)
            if of_tensor is None:
                raise CoverageError(f"{placement.parameter} holds {placement.tensor}, which is no tensor of the model")
            number = numbers.of(placement.box)
            if number not in of_tensor:
                of_tensor[number] = None
                mine.append(placement)
        owned.append(mine)
    tiled: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for name, of_tensor in held.items():
        key = shapes[name], tuple(of_tensor)
        if key not in tiled:
            check_tiling(name, shapes[name], [numbers.boxes[number] for number in of_tensor])
            tiled.add(key)
    return owned


class _BoxNumbers:
    """A number for each distinct box. The placements of a rank share their boxes over layers and experts, so that most
    are known by their id and need not be hashed."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self._by_id: dict[int, tuple[int, Box]] = {}
        self._by_box: dict[Box, int] = {}

    def of(self, box: Box) -> int:
        known = self._by_id.get(id(box))
        if known is None:
            number = self._by_box.setdefault(box, len(self.boxes))
            if number == len(self.boxes):
                self.boxes.append(box)
            # Kept, so that its id stays its own.
            known = self._by_id[id(box)] = number, box
        return known[0]
