"""Ranks as arrays: which part of each axis, which units and which experts every rank of a side holds.

Flows in: a layout. Flows out: `RankTable`. Invariant: a rank holds a piece of a template exactly when it holds the
unit, the expert and the piece's part; nothing here depends on the number of parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slimerl.resharding.layouts import Axis, EngineLayout, ExpertLocation, Layout, MegatronLayout
from slimerl.resharding.planner.templates import IntArray, Parameter
from slimerl.resharding.planner.units import (
    FIRST,
    last_unit,
    layer_unit,
    norm_unit,
    prediction_unit,
    unit_count,
)

BoolArray = NDArray[np.bool_]


def some(mask: BoolArray, axis: int | tuple[int, ...]) -> BoolArray:
    """Whether any is set along an axis (as `mask.any(axis)`, whose type is also that of a single answer)."""
    found: BoolArray = np.logical_or.reduce(mask, axis=axis)
    return found


ExpertKey = tuple[int, ExpertLocation]
"""The model's number of experts, and who says where they are."""


@dataclass(frozen=True)
class RankTable:
    """One side's ranks."""

    ranks: int
    layers: int
    parts: dict[Axis, IntArray]
    """[ranks]"""
    places: dict[ExpertKey, IntArray]
    """[layers or 1, ranks, places]: the expert in each place of a rank; 1: the same in all layers."""
    stages: tuple[dict[int, tuple[str, int]], ...]
    """For each distinct set of units: unit -> the prefix and the number of the layer in the rank's names."""
    stage_of: IntArray
    """[ranks]"""

    @property
    def units(self) -> int:
        return unit_count(self.layers)

    @cached_property
    def holds(self) -> BoolArray:
        """[units, stages]: units that the ranks of a stage have."""
        held = np.zeros((self.units, len(self.stages)), dtype=bool)
        for stage, units in enumerate(self.stages):
            held[list(units), stage] = True
        return held

    @cached_property
    def place_in_stage(self) -> IntArray:
        """[units]: the how-manieth layer of its stage a unit is; what comes behind them counts with the last."""
        place = np.zeros(self.units, dtype=np.int64)
        for units in self.stages:
            layers = sorted(unit for unit in units if FIRST < unit < last_unit(self.layers))
            place[layers] = np.arange(len(layers))
        place[last_unit(self.layers) :] = place.max()
        return place

    def windows(self, count: int) -> IntArray:
        """[units]: units in `count` windows, each with work for every stage."""
        return self.place_in_stage * count // (int(self.place_in_stage.max()) + 1)

    @cached_property
    def copies(self) -> dict[ExpertKey, IntArray]:
        """[layers or 1, experts, ranks]: in how many of its places a rank has an expert."""
        found = {}
        for key, places in self.places.items():
            count = np.zeros((len(places), key[0], self.ranks), dtype=np.int64)
            layer, rank, _ = np.indices(places.shape)
            np.add.at(count, (layer, places, rank), 1)
            found[key] = count
        return found

    def expert_cuts(self, key: ExpertKey) -> IntArray:
        """Experts at which the ranks that hold them change, 0 and the number of experts included."""
        changes = some(np.diff(self.copies[key], axis=1) != 0, (0, 2))
        return np.r_[0, np.flatnonzero(changes) + 1, key[0]]

    def layer_of(self, unit: IntArray, key: ExpertKey) -> IntArray:
        """Index into the first dimension of `places[key]`."""
        return np.zeros_like(unit) if len(self.places[key]) == 1 else unit - layer_unit(0)


def rank_table(layout: Layout, layers: int, prediction: bool, parameters: Iterable[Parameter]) -> RankTable:
    """Ask a layout about each of its ranks, once for all that stand alike.

    Raises:
        LayoutError: the layout cannot cut this many layers or experts.
    """
    ranks = range(layout.world_size)
    parameters = list(parameters)
    axes = {parameter.axis for parameter in parameters}
    parts = {axis: np.array([layout.part(rank, axis).number for rank in ranks], dtype=np.int64) for axis in axes}
    keys = {(p.experts or p.behind, p.location) for p in parameters if p.experts or p.behind}
    places = {key: _places(layout, layers, key) for key in keys}
    stages: dict[tuple[tuple[int, tuple[str, int]], ...], int] = {}
    seen: dict[object, int] = {}
    stage_of = np.zeros(layout.world_size, dtype=np.int64)
    for rank in ranks:
        # Ranks of one pipeline stage hold the same layers; to ask each of them would be slow.
        key = layout.coordinates(rank).pipeline if isinstance(layout, MegatronLayout) else rank
        if key not in seen:
            held = _units(layout, rank, layers, prediction)
            seen[key] = stages.setdefault(tuple(held.items()), len(stages))
        stage_of[rank] = seen[key]
    return RankTable(layout.world_size, layers, parts, places, tuple(map(dict, stages)), stage_of)


def _places(layout: Layout, layers: int, key: ExpertKey) -> IntArray:
    experts, location = key
    mapped = isinstance(layout, EngineLayout) and layout.expert_map is not None
    count = layers if mapped and location is not ExpertLocation.FIXED else 1
    held = [
        [list(layout.expert_slots(rank, experts, location, layer)) for rank in range(layout.world_size)]
        for layer in range(count)
    ]
    return np.array(held, dtype=np.int64)


def _units(layout: Layout, rank: int, layers: int, prediction: bool) -> dict[int, tuple[str, int]]:
    held = {layer_unit(each.layer): (each.prefix, each.local) for each in layout.layers(rank, layers)}
    ends = {
        FIRST: layout.first_prefix(rank),
        last_unit(layers): layout.last_prefix(rank),
        norm_unit(layers): layout.norm_prefix(rank, prediction),
        prediction_unit(layers): layout.prediction_prefix(rank) if prediction else None,
    }
    return held | {unit: (prefix, 0) for unit, prefix in ends.items() if prefix is not None}
