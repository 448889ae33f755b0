"""Templates: every weight of a model once, with the boxes in which either side cuts it.

Flows in: the table of a family and two layouts. Flows out: `Signatures`, in which layers of equal shape and the experts
of a layer share one template: nothing here grows with parameters times ranks. Invariant: boxes are rows and columns
(a vector is one row), and each piece says where in the rank's parameter its box lies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families.table import Block, Rule, Table, Weight
from slimerl.resharding.layouts import Axis, Layout, Part
from slimerl.resharding.planner.wire import WireFormat
from slimerl.resharding.tensors import LogicalTensor

IntArray = NDArray[np.int64]

PARAMETER, PART, ROW, ROW_STOP, COLUMN, COLUMN_STOP, AT_ROW, AT_COLUMN = range(8)
"""Columns of an array of pieces: `part` of `parameter` holds the box at (at_row, at_column) of its own."""


class Extent(NamedTuple):
    rows: int
    columns: int


@dataclass(frozen=True)
class Parameter:
    """A physical parameter of one side, for all layers and ranks that have one like it."""

    name: str
    """Template with `{layer}` and `{expert}`, both as the rank counts them."""
    axis: Axis
    extent: Extent
    """Of one rank; of one expert, where it has experts."""
    experts: int
    stacked: bool
    """The rank's experts are slices of one parameter, not parameters of their own."""
    itemsize: int
    scale: bool
    """Block scales: for the trainer not a stored parameter but what its quantiser makes of one."""
    padding: IntArray
    """Rows (part, row, rows) that belong to no tensor."""


@dataclass(frozen=True)
class Template:
    """One weight of every unit in `units` (0: before the layers, 1 to n: the layers, n + 1: behind them)."""

    name: str
    extent: Extent
    itemsize: int
    """On the wire, in bytes."""
    units: tuple[int, ...]
    experts: int
    """0: no experts."""
    train: IntArray
    engine: IntArray


@dataclass(frozen=True)
class Signatures:
    """All that a plan needs to know of a model under two layouts."""

    units: int
    templates: tuple[Template, ...]
    train_parameters: tuple[Parameter, ...]
    engine_parameters: tuple[Parameter, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes of one copy of the model on the wire."""
        return sum(
            t.extent.rows * t.extent.columns * t.itemsize * len(t.units) * max(t.experts, 1) for t in self.templates
        )


def signatures(table: Table, train: Layout, engine: Layout, wire: WireFormat, transformer_engine: bool) -> Signatures:
    """The templates of a model.

    Raises:
        CoverageError: a weight that one of the sides does not place, or boxes of more than two dimensions.
        LayoutError: the model cannot be cut as a layout asks.
    """
    sides = (_Side(train, wire, transformer_engine), _Side(engine, wire, False))
    templates: list[Template] = []
    for block, units in _blocks(table):
        placed = [side.place(block, rules) for side, rules in zip(sides, (block.megatron, block.engine), strict=True)]
        for weight in block.weights:
            for scale in (False, True) if wire.is_quantised(weight) else (False,):
                pieces = [_pieces_of(found, weight, scale, what) for found, what in zip(placed, _SIDES, strict=True)]
                templates.append(_template(weight, units, scale, wire, pieces))
    return Signatures(len(table.layers) + 2, tuple(templates), tuple(sides[0].parameters), tuple(sides[1].parameters))


_SIDES = ("trainer", "engine")


def _blocks(table: Table) -> Iterator[tuple[Block, tuple[int, ...]]]:
    """Each distinct block with the units that share it."""
    yield table.first, (0,)
    shared: dict[int, list[int]] = {}
    for layer, block in enumerate(table.layers):
        shared.setdefault(id(block), []).append(layer + 1)
    for units in shared.values():
        yield table.layers[units[0] - 1], tuple(units)
    yield table.last, (len(table.layers) + 1,)


def _template(weight: Weight, units: tuple[int, ...], scale: bool, wire: WireFormat, pieces: list[IntArray]) -> Template:
    extent = _extent(weight.shape)
    if scale:
        extent = Extent(wire.blocks(extent.rows), wire.blocks(extent.columns))
    name = wire.scale_name(weight.name) if scale else weight.name
    return Template(name, extent, wire.itemsize(weight, scale), units, weight.experts, pieces[0], pieces[1])


def _pieces_of(found: "_Placed", weight: Weight, scale: bool, side: str) -> IntArray:
    rows = found.get((weight.name, scale))
    if not rows:
        raise CoverageError(f"{weight.name}: the table does not place it on the {side}'s side")
    return np.array(rows, dtype=np.int64)


_Placed = dict[tuple[str, bool], list[tuple[int, ...]]]


def _extent(shape: Sequence[int]) -> Extent:
    if len(shape) > 2:
        raise CoverageError(f"a tensor of shape {tuple(shape)} has more than rows and columns")
    rows, columns = (1, *shape)[-2:] if shape else (1, 1)
    return Extent(rows, columns)


@dataclass
class _Side:
    """Solves the rules of one side; equal cuts of equal shapes along one axis are solved once."""

    layout: Layout
    wire: WireFormat
    transformer_engine: bool
    parameters: list[Parameter] = field(default_factory=list)
    _solved: dict[tuple[object, ...], tuple[list[list[tuple[int, ...]]], Extent, list[tuple[int, ...]]]] = field(
        default_factory=dict
    )

    def place(self, block: Block, rules: Sequence[Rule]) -> _Placed:
        """Pieces of every weight of the block; a source of another block (a tied head) is that block's own."""
        weights = {weight.name: weight for weight in block.weights}
        placed: _Placed = {}
        for rule in rules:
            if any(name not in weights for name in rule.sources):
                continue
            sources = [weights[name] for name in rule.sources]
            for scale in (False, True) if self.wire.is_quantised(sources[0]) else (False,):
                pieces, extent, padding = self._solve(rule, sources, scale)
                number = len(self.parameters)
                self.parameters.append(self._parameter(rule, sources[0], scale, extent, padding))
                for source, rows in zip(sources, pieces, strict=True):
                    placed.setdefault((source.name, scale), []).extend((number, *row) for row in rows)
        return placed

    def _parameter(
        self, rule: Rule, source: Weight, scale: bool, extent: Extent, padding: list[tuple[int, ...]]
    ) -> Parameter:
        name = rule.transformer_engine if self.transformer_engine and rule.transformer_engine else rule.parameter
        return Parameter(
            self.wire.scale_name(name) if scale else name,
            rule.axis,
            extent,
            rule.experts,
            rule.stacked,
            self.wire.itemsize(source, scale),
            scale,
            np.array(padding, dtype=np.int64).reshape(-1, 3),
        )

    def _solve(
        self, rule: Rule, sources: Sequence[Weight], scale: bool
    ) -> tuple[list[list[tuple[int, ...]]], Extent, list[tuple[int, ...]]]:
        key = (rule.cut, rule.axis, tuple(source.shape for source in sources), scale)
        if key not in self._solved:
            # Numbers stand for the names, so that rules with other names share the solution.
            tensors = [LogicalTensor(str(i), source.shape, torch.uint8) for i, source in enumerate(sources)]
            pieces: list[list[tuple[int, ...]]] = [[] for _ in sources]
            padding: list[tuple[int, ...]] = []
            extent = Extent(0, 0)
            for part in range(self.layout.part(0, rule.axis).of):
                shard = rule.cut.shard(tensors, Part(part, self.layout.part(0, rule.axis).of), self.layout)
                rows = [(p.tensor, p.box.starts, p.box.stops, p.at.starts) for p in shard.pieces]
                extent = self._collect(part, rows, scale, pieces, padding, _extent(shard.shape))
            self._solved[key] = pieces, extent, padding
        return self._solved[key]

    def _collect(
        self,
        part: int,
        rows: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
        scale: bool,
        pieces: list[list[tuple[int, ...]]],
        padding: list[tuple[int, ...]],
        extent: Extent,
    ) -> Extent:
        """Append the pieces of one part; returns the extent of its parameter."""
        used_rows = 0
        for tensor, starts, stops, at in rows:
            two = [(0, *values)[-2:] for values in (starts, stops, at)] if len(starts) < 2 else [starts, stops, at]
            (row, column), (row_stop, column_stop), (at_row, at_column) = two
            row_stop = max(row_stop, 1) if len(starts) < 2 else row_stop
            if scale:
                row, row_stop = self.wire.block_range(row, row_stop)
                column, column_stop = self.wire.block_range(column, column_stop)
                at_row, at_column = used_rows, self.wire.blocks(at_column)
                used_rows += row_stop - row
            if tensor:
                pieces[int(tensor)].append((part, row, row_stop, column, column_stop, at_row, at_column))
            else:
                padding.append((part, at_row, row_stop - row))
        return Extent(used_rows, self.wire.blocks(extent.columns)) if scale else extent
