"""Spelling a table out for one rank: from rules to placements.

Flows in: a table, a layout, a rank. Flows out: placements. Invariant: equal layers share one solution; what is left
for each layer and expert is to write the names.
"""

from collections.abc import Callable, Sequence

import torch

from slimerl.resharding.boxes import Box
from slimerl.resharding.families.cuts import Piece
from slimerl.resharding.families.table import Block, Rule, Table
from slimerl.resharding.layouts import Layout
from slimerl.resharding.tensors import LogicalTensor, Placement


class Speller:
    """One side of one rank; `rules` picks that side of a block."""

    def __init__(self, layout: Layout, rank: int, rules: Callable[[Block], Sequence[Rule]]) -> None:
        self._layout, self._rank, self._rules = layout, rank, rules
        self._of_block: dict[int, list[tuple[Rule, tuple[Piece, ...]]]] = {}
        self._slices: dict[tuple[int, int], Box] = {}
        self._placements: list[Placement] = []
        self._common: dict[str, tuple[int, ...]] = {}

    def placements(self, table: Table) -> list[Placement]:
        """Raises LayoutError where the model cannot be cut as the layout asks."""
        layout, rank = self._layout, self._rank
        self._common = {weight.name: weight.shape for weight in table.first.weights}
        first, last = layout.first_prefix(rank), layout.last_prefix(rank)
        if first is not None:
            self._place(table.first, first, 0, 0)
        for held in layout.layers(rank, len(table.layers)):
            self._place(table.layers[held.layer], held.prefix, held.local, held.layer)
        norm = layout.norm_prefix(rank, table.prediction is not None)
        for after_layers, prefix in ((True, norm), (False, last)):
            if prefix is not None:
                self._place(table.last, prefix, 0, 0, apart=first is None, after_layers=after_layers)
        prediction = layout.prediction_prefix(rank)
        if table.prediction is not None and prediction is not None:
            self._place(table.prediction, prediction, 0, len(table.layers), apart=first is None)
        return self._placements

    def _place(
        self, block: Block, prefix: str, local: int, layer: int, apart: bool = True, after_layers: bool | None = None
    ) -> None:
        """`after_layers`: only the rules that say so, or only the others."""
        for rule, pieces in self._solved(block):
            if (rule.only_apart and not apart) or after_layers not in (None, rule.after_layers):
                continue
            name = prefix + rule.parameter
            if not rule.experts:
                self._append(name.format(layer=local), pieces, layer, 0, None)
                continue
            experts = self._layout.expert_slots(self._rank, rule.experts, rule.location, layer)
            if rule.behind:
                self._append(name.format(layer=local), pieces, layer, 0, len(experts))
                continue
            for slot, expert in enumerate(experts):
                parameter = name.format(layer=local, expert=slot)
                self._append(parameter, pieces, layer, expert, slot if rule.stacked else None)

    def _append(self, parameter: str, pieces: Sequence[Piece], layer: int, expert: int, slot: int | None) -> None:
        for piece in pieces:
            at = piece.at if slot is None else self._slice(piece.at, slot)
            tensor = piece.tensor.format(layer=layer, expert=expert)
            self._placements.append(Placement(parameter, at, tensor, piece.box))

    def _slice(self, at: Box, slot: int) -> Box:
        key = id(at), slot
        if key not in self._slices:
            self._slices[key] = Box((slot, *at.starts), (slot + 1, *at.stops))
        return self._slices[key]

    def _solved(self, block: Block) -> list[tuple[Rule, tuple[Piece, ...]]]:
        # The table holds its blocks, so their ids last as long as this object is used.
        if id(block) not in self._of_block:
            shapes = self._common | {weight.name: weight.shape for weight in block.weights}
            rules = [self._chosen(rule) for rule in self._rules(block)]
            self._of_block[id(block)] = [(rule, self._pieces(rule, shapes)) for rule in rules]
        return self._of_block[id(block)]

    def _chosen(self, rule: Rule) -> Rule:
        return rule.fused if rule.fused is not None and self._layout.fused_shared_experts else rule

    def _pieces(self, rule: Rule, shapes: dict[str, tuple[int, ...]]) -> tuple[Piece, ...]:
        sources = [LogicalTensor(name, shapes[name], torch.float32) for name in rule.sources]
        return rule.cut.shard(sources, self._layout.part(self._rank, rule.axis), self._layout).pieces
