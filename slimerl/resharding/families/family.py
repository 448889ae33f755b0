"""A family: its table, spelled out for a model, a layout and a rank.

Flows in: `config.json` as a mapping, a layout, a rank. Flows out: logical tensors and placements.
Invariant: a rank's placements tile every parameter that it names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slimerl.resharding.boxes import Box
from slimerl.resharding.families.blocks import EMBEDDING, ConfigError
from slimerl.resharding.families.cuts import Shard
from slimerl.resharding.families.table import Block, Rule, Table, Weight
from slimerl.resharding.layouts import EngineLayout, Layout, MegatronLayout, ModuleNames
from slimerl.resharding.tensors import LogicalTensor, Placement

Config = Mapping[str, Any]


def model_dtype(config: Config) -> torch.dtype:
    """The dtype that config.json states; float32 where it states none. Raises ConfigError for an unknown name."""
    stated = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(stated).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"config.json: dtype {stated!r} is not a torch dtype")
    return dtype


@dataclass(frozen=True)
class Family:
    """All models of one `model_type`; `table(config)` is the only place that knows their layout."""

    model_type: str
    table: Callable[[Config], Table]

    def logical_tensors(self, config: Config, dtype: torch.dtype | None = None) -> list[LogicalTensor]:
        """All tensors of the checkpoint in its order, in the dtype of the config or, where given, `dtype`.

        Weights with a dtype of their own (router biases) keep it. Raises ConfigError.
        """
        table = self.table(config)
        dtype = model_dtype(config) if dtype is None else dtype
        found: list[LogicalTensor] = []
        for layer, block in _blocks(table):
            found += [tensor for weight in block.weights for tensor in _expand(weight, layer, dtype)]
        return found

    def fused_groups(self, config: Config) -> list[tuple[str, ...]]:
        """Names that must travel together, because the engine holds them in one parameter: q|k|v, gate|up."""
        groups = []
        for layer, block in _blocks(self.table(config)):
            for rule in block.engine:
                if len(rule.sources) > 1:
                    groups += [
                        tuple(name.format(layer=layer, expert=expert) for name in rule.sources)
                        for expert in range(rule.experts or 1)
                    ]
        return groups

    def aliases(self, config: Config) -> dict[str, str]:
        """Names that some checkpoints carry as a second copy of another tensor: a tied head."""
        tied = not any(weight.name == "lm_head.weight" for weight in self.table(config).last.weights)
        return {"lm_head.weight": EMBEDDING} if tied else {}

    def megatron_placements(self, config: Config, layout: MegatronLayout, rank: int) -> list[Placement]:
        """Placements in the parameters of Megatron's global rank `rank`, named as in GPTModel.named_parameters().

        Raises:
            ConfigError: the table does not have what the config asks for.
            LayoutError: the model cannot be cut like that.
        """
        te_names = layout.names == ModuleNames.TRANSFORMER_ENGINE
        return _placements(self.table(config), layout, rank, lambda block: block.megatron, te_names)

    def engine_placements(self, config: Config, layout: EngineLayout, rank: int) -> list[Placement]:
        """Placements in the parameters of rank `rank` of one SGLang server. Raises as `megatron_placements`."""
        return _placements(self.table(config), layout, rank, lambda block: block.engine, False)


def _blocks(table: Table) -> Iterator[tuple[int, Block]]:
    yield 0, table.first
    yield from enumerate(table.layers)
    yield 0, table.last


def _expand(weight: Weight, layer: int, dtype: torch.dtype) -> list[LogicalTensor]:
    return [
        LogicalTensor(weight.name.format(layer=layer, expert=expert), weight.shape, weight.dtype or dtype)
        for expert in range(weight.experts or 1)
    ]


def _placements(
    table: Table, layout: Layout, rank: int, rules: Callable[[Block], tuple[Rule, ...]], te_names: bool
) -> list[Placement]:
    placements: list[Placement] = []
    shards: dict[int, Shard] = {}
    first_shapes = {weight.name: weight.shape for weight in table.first.weights}

    def solve(rule: Rule, block: Block) -> Shard:
        # Templates in, templates out: the layers that share a block share one solution.
        if id(rule) not in shards:
            shapes = first_shapes | {weight.name: weight.shape for weight in block.weights}
            sources = [LogicalTensor(name, shapes[name], torch.float32) for name in rule.sources]
            shards[id(rule)] = rule.cut.shard(sources, layout.part(rank, rule.axis), layout)
        return shards[id(rule)]

    def place(block: Block, prefix: str, local: int, layer: int, apart: bool = True) -> None:
        for rule in rules(block):
            if rule.only_apart and not apart:
                continue
            name = prefix + (rule.transformer_engine if te_names and rule.transformer_engine else rule.parameter)
            experts: Sequence[int] = layout.experts(rank, rule.experts) if rule.experts else (0,)
            for index, expert in enumerate(experts):
                parameter = name.format(layer=local, expert=index)
                for piece in solve(rule, block).pieces:
                    at = _stacked(piece.at, index) if rule.stacked else piece.at
                    placements.append(
                        Placement(parameter, at, piece.tensor.format(layer=layer, expert=expert), piece.box)
                    )

    first, last = layout.first_prefix(rank), layout.last_prefix(rank)
    if first is not None:
        place(table.first, first, 0, 0)
    for held in layout.layers(rank, len(table.layers)):
        place(table.layers[held.layer], held.prefix, held.local, held.layer)
    if last is not None:
        place(table.last, last, 0, 0, apart=first is None)
    return placements


def _stacked(at: Box, index: int) -> Box:
    return Box((index, *at.starts), (index + 1, *at.stops))
