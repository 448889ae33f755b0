"""Patches for engine ranks (`engine/inside/patch.py`), made of the state that was sent last and of what changed in it.

Flows in: the placements of every rank of an engine, names of tensors, their changes. Flows out: a patch for each rank,
of its own boxes alone. Invariants: a box that several ranks hold is encoded once; changes that would take more bytes
than the box itself travel as the box.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from slimerl.engine.inside.delta import Changes, encode, units
from slimerl.engine.inside.patch import Body, Part, pack_patch
from slimerl.resharding.boxes import Box
from slimerl.resharding.coverage import CoverageError, some_names
from slimerl.resharding.sent_state import SentState
from slimerl.resharding.tensors import PADDING, Placement


class PatchWriter:
    """For one transfer; the tensors are those of `state`."""

    def __init__(self, placements: Sequence[Sequence[Placement]], state: SentState) -> None:
        """`placements`: of each rank of an engine."""
        self._state = state
        self._placed: list[dict[str, list[Placement]]] = [{} for _ in placements]
        for of_tensor, placed in zip(self._placed, placements, strict=True):
            for placement in placed:
                of_tensor.setdefault(placement.tensor, []).append(placement)

    def check_placed(self, names: Iterable[str]) -> None:
        """Raises CoverageError where a tensor has no place in an engine."""
        if strange := [name for name in names if not any(name in of_tensor for of_tensor in self._placed)]:
            raise CoverageError(f"the engines have no place for {some_names(strange)}")

    def changing(self, names: Sequence[str], changes: Mapping[str, Changes]) -> list[bytearray]:
        """For each rank: what changes in its part of these tensors; all of those that `changes` leaves out."""
        return self._patches(names, changes)

    def whole(self, names: Sequence[str]) -> list[bytearray]:
        """For each rank: all of its part of these tensors, and with the first bucket the zeros of its padding."""
        return self._patches(names, {}, clears=names == self._state.buckets[0])

    def _patches(self, names: Sequence[str], changes: Mapping[str, Changes], clears: bool = False) -> list[bytearray]:
        bodies: dict[tuple[str, Box], tuple[str, Body]] = {}
        patches = []
        for of_tensor in self._placed:
            parts: list[tuple[Part, Body]] = []
            if clears:
                parts += [(_part(placement, "zero", None, 0), b"") for placement in of_tensor.get(PADDING, ())]
            for name in names:
                for placement in of_tensor.get(name, ()):
                    key = name, placement.box
                    if key not in bodies:
                        bodies[key] = self._body(*key, changes.get(name))
                    form, body = bodies[key]
                    if len(body):
                        parts.append((_part(placement, form, self._state.tensors[name].dtype, len(body)), body))
            patches.append(pack_patch(parts))
        return patches

    def _body(self, name: str, box: Box, changes: Changes | None) -> tuple[str, Body]:
        """Empty where nothing changed."""
        tensor = self._state.tensors[name]
        if changes is not None:
            inside = changes_in_box(changes, tuple(tensor.shape), box)
            steps = encode(inside) if len(inside) else b""
            if len(steps) < box.numel * tensor.element_size():
                return "steps", steps
        return "whole", units(tensor[box.slices]).view(np.uint8).data


def changes_in_box(changes: Changes, shape: tuple[int, ...], box: Box) -> Changes:
    """Those inside a box of a tensor of this shape, counted in the box in row-major order."""
    if box == Box.whole(shape):
        return changes
    row = int(np.prod(shape[1:], dtype=np.int64))
    first, last = np.searchsorted(changes.positions, (box.starts[0] * row, box.stops[0] * row))
    positions, steps = changes.positions[first:last], changes.steps[first:last]
    if box.shape[1:] == shape[1:]:
        return Changes(positions - box.starts[0] * row, steps)
    where = np.unravel_index(positions, shape)
    inside = np.ones(len(positions), bool)
    for along, start, stop in zip(where, box.starts, box.stops, strict=True):
        inside &= (along >= start) & (along < stop)
    shifted = tuple(along[inside] - start for along, start in zip(where, box.starts, strict=True))
    return Changes(np.ravel_multi_index(shifted, box.shape), steps[inside])


def _part(placement: Placement, form: str, dtype: torch.dtype | None, nbytes: int) -> Part:
    return {
        "parameter": placement.parameter,
        "at": [list(placement.at.starts), list(placement.at.stops)],
        "shape": list(placement.box.shape),
        "dtype": str(dtype).removeprefix("torch."),
        "form": form,
        "nbytes": nbytes,
    }
