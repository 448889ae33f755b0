"""Block scales: the FP8 form of a table, in which matrices are FP8 and bring one fp32 scale for each square block.

Flows in: `quantization_config` of a config.json, a table. Flows out: the table that the engine holds.
Invariant: a scale lies wherever its block lies; the boxes of `X.weight_scale_inv` are those of `X.weight` divided by
the block, and data and scale travel together.

Only the engine's rules change: a trainer keeps its own dtype and makes data and scales when it sends.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch

from slimerl.resharding.boxes import Box
from slimerl.resharding.families.blocks import ConfigError
from slimerl.resharding.families.cuts import Cut, Piece, Shard
from slimerl.resharding.families.table import Block, Rule, Table, Weight
from slimerl.resharding.layouts import Layout, LayoutError, Part
from slimerl.resharding.tensors import LogicalTensor

_SUFFIX = "_scale_inv"
_SERVE_ANOTHER = (
    "serve an unquantised checkpoint, or one with quant_method fp8 and weight_block_size [128, 128] in its config.json"
)


class BlockCutError(LayoutError):
    """A trainer's rank holds a part of an FP8 block: its scale, and with it its bytes, depend on another rank too."""


@dataclass(frozen=True)
class BlockScales:
    """FP8 (e4m3) in blocks of `block` x `block`, as in DeepSeek's checkpoints."""

    block: int = 128
    ignored: tuple[str, ...] = ()
    """Modules that stay unquantised although their kind is not; `model.layers.3` means all below it, `o_proj` every
    one."""
    powers_of_two: bool = False
    """Scales are rounded up to powers of two (UE8M0: DeepSeek-V3.1, and what DeepGEMM wants on Blackwell)."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "BlockScales | None":
        """As `config.json` says; None where the model is not quantised. Raises ConfigError for another format."""
        stated = config.get("quantization_config")
        if stated is None:
            return None
        if not isinstance(stated, Mapping):
            raise ConfigError(f"config.json: quantization_config = {stated!r} is no object; {_SERVE_ANOTHER}")
        size = stated.get("weight_block_size")
        square = isinstance(size, list) and len(size) == 2 and type(size[0]) is int and size[0] == size[1]
        if stated.get("quant_method") != "fp8" or not isinstance(size, list) or not square:
            raise ConfigError(
                f"config.json: quantization_config = {dict(stated)!r} is not FP8 in square blocks; {_SERVE_ANOTHER}"
            )
        if size[0] < 1:
            raise ConfigError(
                f"config.json: quantization_config.weight_block_size = {size}: no block; {_SERVE_ANOTHER}"
            )
        for key in ("ignored_layers", "modules_to_not_convert"):
            names = stated.get(key) or []
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ConfigError(f"config.json: quantization_config.{key} = {names!r} is no list of modules' names")
        ignored = stated.get("ignored_layers") or stated.get("modules_to_not_convert") or ()
        if (scale_format := stated.get("scale_fmt")) not in (None, "float", "ue8m0"):
            raise ConfigError(f"config.json: quantization_config has scale_fmt {scale_format!r}; known is 'ue8m0'")
        return cls(size[0], tuple(ignored), scale_format == "ue8m0")

    def blocks(self, size: int) -> int:
        """Blocks that `size` rows or columns need."""
        return -(-size // self.block)

    def check_whole(self, what: str, box: Box, shape: Sequence[int]) -> None:
        """`box`: what a trainer's rank holds in one piece of a tensor of this shape.

        Raises:
            BlockCutError: it ends inside a block.
        """
        for dimension, (start, stop, size) in enumerate(zip(box.starts, box.stops, shape, strict=True)):
            if start % self.block or (stop % self.block and stop != size):
                raise BlockCutError(
                    f"{what} holds {('rows', 'columns')[dimension]} {start} to {stop} of {size}, which cuts a block "
                    f"of {self.block}: no rank alone knows its FP8 scale; choose a trainer's tensor or expert_tensor "
                    "size that leaves whole blocks, or a transport that gathers whole tensors (broadcast, ipc, disk)"
                )

    def quantises(self, weight: Weight, layer: int) -> bool:
        """Raises ConfigError where only some of the experts are ignored, which the engine holds in one parameter."""
        if not weight.quantised or not self.ignored:
            return weight.quantised
        names_experts = weight.experts and any(_ONE_EXPERT.search(name) for name in self.ignored)
        ignored = [
            self._ignores(weight.name.format(layer=layer, expert=expert))
            for expert in range(weight.experts if names_experts else 1)
        ]
        if any(ignored) and not all(ignored):
            left_out = weight.name.format(layer=layer, expert=ignored.index(True))
            raise ConfigError(
                f"config.json: quantization_config leaves out {left_out}, but not expert {ignored.index(False)} of the "
                "same layer, which the engine holds in one parameter with it; leave out all of them or none"
            )
        return not ignored[0]

    def _ignores(self, name: str) -> bool:
        """By whole modules, wherever they stand in the name (SGLang's `is_layer_skipped`): layers.1 is not layers.10,
        and self_attn is that of every layer."""
        parts = name.split(".")
        ends = combinations(range(len(parts) + 1), 2)
        return any(".".join(parts[first:last]) in self._modules for first, last in ends)

    @cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(module.rstrip(".") for module in self.ignored)


_ONE_EXPERT = re.compile(r"experts\.\d")


def scale_name(name: str) -> str:
    """Of a weight or of a parameter: `X.weight` has `X.weight_scale_inv`, `w13_weight` has `w13_weight_scale_inv`."""
    return f"{name}{_SUFFIX}"


def with_scales(table: Table, scales: BlockScales) -> Table:
    """The table of the quantised model. Layers that shared a block share one again.

    Raises:
        ConfigError: only some of the weights that the engine fuses are ignored.
    """
    made: dict[tuple[int, tuple[bool, ...]], Block] = {}

    def quantised(block: Block, layer: int) -> Block:
        chosen = tuple(scales.quantises(weight, layer) for weight in block.weights)
        key = id(block), chosen
        if key not in made:
            names = {weight.name for weight, taken in zip(block.weights, chosen, strict=True) if taken}
            made[key] = _quantised(block, names, scales)
        return made[key]

    return replace(
        table,
        first=quantised(table.first, 0),
        layers=tuple(quantised(block, layer) for layer, block in enumerate(table.layers)),
        last=quantised(table.last, 0),
        prediction=None if table.prediction is None else quantised(table.prediction, len(table.layers)),
    )


def _quantised(block: Block, names: set[str], scales: BlockScales) -> Block:
    weights: list[Weight] = []
    shapes = {weight.name: weight.shape for weight in block.weights}
    for weight in block.weights:
        if weight.name not in names:
            weights.append(weight)
            continue
        weights.append(replace(weight, dtype=torch.float8_e4m3fn))
        shape = tuple(map(scales.blocks, weight.shape))
        weights.append(Weight(scale_name(weight.name), shape, torch.float32, weight.experts))
    rules: list[Rule] = []
    for rule in block.engine:
        rules.append(rule)
        taken = [name in names for name in rule.sources]
        if any(taken):
            if not all(taken):
                raise ConfigError(
                    f"config.json: quantization_config leaves out some of {', '.join(rule.sources)}, which the engine "
                    f"holds in one parameter {rule.parameter}; leave out all of them or none"
                )
            rules.append(_scale_rule(rule, shapes, scales))
    return Block(tuple(weights), block.megatron, tuple(rules))


def _scale_rule(rule: Rule, shapes: Mapping[str, tuple[int, ...]], scales: BlockScales) -> Rule:
    return replace(
        rule,
        parameter=scale_name(rule.parameter),
        sources=tuple(map(scale_name, rule.sources)),
        cut=ScaleCut(rule.cut, tuple(shapes[name] for name in rule.sources), scales),
        fused=None if rule.fused is None else _scale_rule(rule.fused, shapes, scales),
    )


@dataclass(frozen=True)
class ScaleCut:
    """The data's cut, in blocks. The engine refuses shards that end inside a block, and so does this."""

    data: Cut
    shapes: tuple[tuple[int, ...], ...]
    """Of the data that the sources scale."""
    scales: BlockScales

    def shard(self, sources: Sequence[LogicalTensor], part: Part, layout: Layout) -> Shard:
        data = [
            LogicalTensor(source.name, shape, torch.float8_e4m3fn)
            for source, shape in zip(sources, self.shapes, strict=True)
        ]
        shape_of = dict(zip((source.name for source in sources), self.shapes, strict=True))
        shard = self.data.shard(data, part, layout)
        pieces = tuple(self._in_blocks(piece, shape_of[piece.tensor], part) for piece in shard.pieces)
        return Shard(tuple(map(self.scales.blocks, shard.shape)), pieces)

    def _in_blocks(self, piece: Piece, shape: tuple[int, ...], part: Part) -> Piece:
        block = self.scales.block
        whole = all(
            start % block == 0 and (stop % block == 0 or stop == size)
            for start, stop, size in zip(piece.box.starts, piece.box.stops, shape, strict=True)
        )
        if not whole or any(start % block for start in piece.at.starts):
            raise LayoutError(
                f"{piece.tensor.removesuffix(_SUFFIX)}: part {part.number} of {part.of} is {piece.box.shape}, and FP8 "
                f"scales need shards of whole blocks of {block}; cut it over fewer ranks (replicated_dense, "
                "replicated_shared, more expert parallelism, data_attention)"
            )
        return Piece(self._divided(piece.at), piece.tensor, self._divided(piece.box))

    def _divided(self, box: Box) -> Box:
        starts = tuple(start // self.scales.block for start in box.starts)
        return Box(starts, tuple(map(self.scales.blocks, box.stops)))
