"""Templates: every weight of a model once, with the boxes in which either side cuts it.

Flows in: the table of a family in the form that the engine holds, two layouts. Flows out: `Signatures`, in which layers
of equal shape and the experts of a layer share one template: nothing here grows with parameters times ranks.
Invariant: boxes are rows and columns (a vector is one row), and each piece says where in the rank's parameter its box
lies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slimerl.resharding.boxes import joined_by_rows
from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families.cuts import Shard
from slimerl.resharding.families.scales import BlockScales, scale_name
from slimerl.resharding.families.table import Block, Rule, Table, Weight
from slimerl.resharding.layouts import Axis, ExpertLocation, Layout, Part
from slimerl.resharding.planner.units import blocks_of, norm_unit
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
    """Of one rank; of one slice, where it is stacked."""
    experts: int
    """0: the rank holds it whatever its experts."""
    location: ExpertLocation
    stacked: bool
    """A slice for each of the rank's experts, in their order."""
    behind: int
    """Not those slices but the one behind them; the number of experts in the model, 0: no."""
    itemsize: int
    """Of the destination, and of what is sent."""
    padding: IntArray
    """Rows (part, row, rows) that belong to no tensor."""
    scales: bool = False
    """Trainer: not the parameter but what a quantiser makes of it: the scales of each of its pieces, one piece's below
    the other's. Rows and columns count blocks."""


@dataclass(frozen=True)
class Template:
    """One weight of every unit in `units`."""

    name: str
    extent: Extent
    itemsize: int
    """On the wire, in bytes."""
    units: tuple[int, ...]
    experts: int
    """0: no experts."""
    location: ExpertLocation
    train: IntArray
    engine: IntArray


@dataclass(frozen=True)
class Signatures:
    """All that a plan needs to know of a model under two layouts."""

    layers: int
    prediction: bool
    templates: tuple[Template, ...]
    train_parameters: tuple[Parameter, ...]
    engine_parameters: tuple[Parameter, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes of one copy of the model on the wire."""
        return sum(
            t.extent.rows * t.extent.columns * t.itemsize * len(t.units) * max(t.experts, 1) for t in self.templates
        )


def signatures(
    table: Table,
    train: Layout,
    engine: Layout,
    dtype: torch.dtype,
    scales: BlockScales | None,
    transformer_engine: bool = False,
) -> Signatures:
    """The templates of a model.

    `table`: as the engine holds it, with scales where it is quantised. `dtype`: of weights without one of their own.

    Raises:
        CoverageError: a weight that one of the sides does not place, or boxes of more than two dimensions.
        LayoutError: the model cannot be cut as a layout asks.
    """
    sender = _Side(train, "trainer", dtype, scales, transformer_engine)
    receiver = _Side(engine, "engine", dtype)
    templates: list[Template] = []
    for block, units in blocks_of(table):
        senders = sender.place(block, block.megatron)
        takers = receiver.place(block, block.engine)
        for weight in block.weights:
            train_pieces, engine_pieces = sender.pieces_of(senders, weight), receiver.pieces_of(takers, weight)
            first = receiver.parameters[int(engine_pieces[0, PARAMETER])]
            found = (norm_unit(len(table.layers)),) if weight.name in senders.after_layers else units
            templates.append(
                Template(weight.name, extent_of(weight.shape), (weight.dtype or dtype).itemsize, found,
                         weight.experts, first.location, train_pieces, engine_pieces)
            )  # fmt: skip
    return Signatures(
        len(table.layers),
        table.prediction is not None,
        tuple(templates),
        tuple(sender.parameters),
        tuple(receiver.parameters),
    )


def extent_of(shape: Sequence[int]) -> Extent:
    """Raises CoverageError for more than two dimensions."""
    if len(shape) > 2:
        raise CoverageError(f"a tensor of shape {tuple(shape)} has more than rows and columns")
    rows, columns = (1, *shape)[-2:] if shape else (1, 1)
    return Extent(rows, columns)


_Row = tuple[int, ...]


class _Solution(NamedTuple):
    """Of one rule, for all parts."""

    pieces: list[list[_Row]]
    """For each source, rows of pieces without the parameter's number."""
    extent: Extent
    padding: list[_Row]


@dataclass
class _Placed:
    pieces: dict[str, list[_Row]] = field(default_factory=dict)
    after_layers: set[str] = field(default_factory=set)


@dataclass
class _Side:
    """Solves the rules of one side; equal cuts of equal shapes along one axis are solved once."""

    layout: Layout
    what: str
    dtype: torch.dtype
    scales: BlockScales | None = None
    """Trainer: what its quantiser makes of the weights."""
    transformer_engine: bool = False
    parameters: list[Parameter] = field(default_factory=list)
    _solved: dict[tuple[object, ...], _Solution] = field(default_factory=dict)

    def place(self, block: Block, rules: Sequence[Rule]) -> _Placed:
        """Pieces of every weight of the block; a source of another block (a tied head) is that block's own."""
        weights = {weight.name: weight for weight in block.weights}
        placed = _Placed()
        for rule in rules:
            if any(name not in weights for name in rule.sources):
                continue
            if rule.fused is not None and self.layout.fused_shared_experts:
                rule = rule.fused
            if rule.after_layers:
                placed.after_layers.update(rule.sources)
            self._add(rule, [weights[name] for name in rule.sources], placed, False)
            if self.scales is not None and all(scale_name(name) in weights for name in rule.sources):
                self._add(rule, [weights[name] for name in rule.sources], placed, True)
        return placed

    def pieces_of(self, placed: _Placed, weight: Weight) -> IntArray:
        rows = placed.pieces.get(weight.name)
        if not rows:
            raise CoverageError(f"{weight.name}: the table does not place it on the {self.what}'s side")
        return np.array(rows, dtype=np.int64)

    def _add(self, rule: Rule, sources: Sequence[Weight], placed: _Placed, scaled: bool) -> None:
        solution = self._solve(rule, sources, scaled)
        number = len(self.parameters)
        dtype = torch.float32 if scaled else sources[0].dtype or self.dtype
        name = rule.transformer_engine if self.transformer_engine and rule.transformer_engine else rule.parameter
        self.parameters.append(
            Parameter(
                name,
                rule.axis,
                solution.extent,
                0 if rule.behind else rule.experts,
                rule.location,
                rule.stacked,
                rule.experts if rule.behind else 0,
                dtype.itemsize,
                np.array(solution.padding, dtype=np.int64).reshape(-1, 3),
                scaled,
            )
        )
        for source, rows in zip(sources, solution.pieces, strict=True):
            target = scale_name(source.name) if scaled else source.name
            placed.pieces.setdefault(target, []).extend((number, *row) for row in rows)

    def _solve(self, rule: Rule, sources: Sequence[Weight], scaled: bool) -> _Solution:
        key = (rule.cut, rule.axis, tuple(source.shape for source in sources), scaled)
        if key not in self._solved:
            # Rules with other names share the solution; the names are for messages.
            tensors = [LogicalTensor(source.name, source.shape, torch.uint8) for source in sources]
            number = {source.name: i for i, source in enumerate(sources)}
            pieces: list[list[_Row]] = [[] for _ in sources]
            padding: list[_Row] = []
            extent = Extent(0, 0)
            parts = self.layout.part(0, rule.axis).of
            for part in range(parts):
                shard = rule.cut.shard(tensors, Part(part, parts), self.layout)
                extent = extent_of(shard.shape)
                if scaled:
                    self._check_blocks(shard, tensors, f"part {part} of {parts} of the trainer")
                used = 0
                for piece in shard.pieces:
                    row = _rows_and_columns(part, (piece.box.starts, piece.box.stops, piece.at.starts))
                    if not piece.tensor:
                        padding.append((part, row[5], row[2] - row[1]))
                        continue
                    if scaled:
                        row = self._in_blocks(row, used)
                        used += row[2] - row[1]
                    pieces[number[piece.tensor]].append(row)
            self._solved[key] = _Solution(pieces, extent, padding)
        return self._solved[key]

    def _check_blocks(self, shard: Shard, sources: Sequence[LogicalTensor], part: str) -> None:
        """Raises LayoutError where a block of a source lies in this part and in another."""
        assert self.scales is not None
        for source in sources:
            # Heads that follow each other in the tensor may share a block, wherever they lie in the parameter.
            boxes = sorted((piece.box for piece in shard.pieces if piece.tensor == source.name), key=lambda b: b.starts)
            for run in joined_by_rows(boxes):
                self.scales.check_whole(f"{source.name}: {part}", run, source.shape)

    def _in_blocks(self, row: _Row, used: int) -> _Row:
        """The blocks that begin in a piece: one that straddles two pieces of a part belongs to where it begins.

        A quantiser makes the blocks of each piece of a parameter, one piece's below the other's.
        """
        assert self.scales is not None
        top, bottom, left, right = map(self.scales.blocks, row[1:5])
        return row[0], top, bottom, left, right, used, 0


def _rows_and_columns(part: int, spans: tuple[tuple[int, ...], ...]) -> _Row:
    starts, stops, at = spans
    if len(starts) == 2:
        return part, starts[0], stops[0], starts[1], stops[1], at[0], at[1]
    ((start, stop, place),) = zip(starts, stops, at, strict=True)
    return part, 0, 1, start, stop, 0, place
