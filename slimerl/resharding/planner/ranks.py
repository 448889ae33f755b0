"""Ranks as arrays: which part of each axis, which units and which experts every rank of a side holds.

Flows in: a layout. Flows out: `RankTable`. Invariant: a rank holds a piece of a template exactly when it holds the
unit, the expert and the piece's part; nothing here depends on the number of parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slimerl.resharding.layouts import Axis, HeldLayer, Layout, LayoutError, MegatronLayout
from slimerl.resharding.planner.templates import IntArray

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class RankTable:
    """One side's ranks. Unit 0 stands before the layers, 1 to n are the layers, n + 1 behind them."""

    ranks: int
    parts: dict[Axis, IntArray]
    """[ranks]"""
    experts: dict[int, IntArray]
    """For a model's number of experts: first and one past the last that each rank holds, [ranks, 2]."""
    stages: tuple[dict[int, tuple[str, int]], ...]
    """For each distinct set of units: unit -> the prefix and the number of the layer in the rank's names."""
    stage_of: IntArray
    """[ranks]"""
    units: int

    @cached_property
    def holds(self) -> BoolArray:
        """[units, stages]: units that the ranks of a stage have."""
        held = np.zeros((self.units, len(self.stages)), dtype=bool)
        for stage, units in enumerate(self.stages):
            held[list(units), stage] = True
        return held

    @cached_property
    def window_of(self) -> IntArray:
        """[units]: the how-manieth unit of its stage it is, so that one window has work for every stage."""
        window = np.zeros(self.units, dtype=np.int64)
        for units in self.stages:
            layers = sorted(unit for unit in units if 0 < unit < self.units - 1)
            window[layers] = np.arange(len(layers))
        window[self.units - 1] = window.max()
        return window

    def expert_cuts(self, experts: int) -> IntArray:
        """Where one rank's experts end and another's begin, 0 and `experts` included."""
        return np.unique(np.concatenate([self.experts[experts].ravel(), [0, experts]]))


def rank_table(layout: Layout, units: int, axes: Iterable[Axis], experts: Iterable[int]) -> RankTable:
    """Ask a layout about each of its ranks, once for all that stand alike.

    Raises:
        LayoutError: the layout cannot cut this many layers or experts.
    """
    ranks = range(layout.world_size)
    parts = {axis: np.array([layout.part(rank, axis).number for rank in ranks], dtype=np.int64) for axis in axes}
    held = {}
    for count in experts:
        spans = [layout.experts(rank, count) for rank in ranks]
        if any(span.step != 1 for span in spans):
            raise LayoutError("experts of a rank must follow each other")
        held[count] = np.array([(span.start, span.stop) for span in spans], dtype=np.int64).reshape(-1, 2)
    stages: dict[tuple[tuple[int, tuple[str, int]], ...], int] = {}
    seen: dict[object, int] = {}
    stage_of = np.zeros(layout.world_size, dtype=np.int64)
    for rank in ranks:
        key = _stands(layout, rank)
        if key not in seen:
            seen[key] = stages.setdefault(tuple(_units(layout, rank, units).items()), len(stages))
        stage_of[rank] = seen[key]
    return RankTable(layout.world_size, parts, held, tuple(map(dict, stages)), stage_of, units)


def _stands(layout: Layout, rank: int) -> object:
    """Ranks with the same answer hold the same layers; to ask each rank for its layers would be slow."""
    return layout.coordinates(rank).pipeline if isinstance(layout, MegatronLayout) else rank


def _units(layout: Layout, rank: int, units: int) -> dict[int, tuple[str, int]]:
    layers: list[HeldLayer] = layout.layers(rank, units - 2)
    held = {layer.layer + 1: (layer.prefix, layer.local) for layer in layers}
    first, last = layout.first_prefix(rank), layout.last_prefix(rank)
    if first is not None:
        held[0] = first, 0
    if last is not None:
        held[units - 1] = last, 0
    return held
