"""A family: its table, spelled out for a model, a layout and a rank.

Flows in: `config.json` as a mapping, a layout, a rank. Flows out: logical tensors and placements.
Invariant: a rank's placements tile every parameter that it names.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from slimerl.resharding.buckets import aligned
from slimerl.resharding.families.blocks import EMBEDDING, ConfigError
from slimerl.resharding.families.scales import BlockScales, scale_name, with_scales
from slimerl.resharding.families.score import SCORE, with_score
from slimerl.resharding.families.spelling import Speller
from slimerl.resharding.families.table import Block, Rule, Table, Weight
from slimerl.resharding.layouts import EngineLayout, MegatronLayout, ModuleNames
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
class Form:
    """Which tensors of a model are meant, and how they are stored: the same table as one program sees it."""

    prediction: bool = False
    """With the multi-token-prediction layer: a trainer that has one, a checkpoint, an engine with a draft model."""
    scales: BlockScales | None = None
    """Quantised, as the engine and its checkpoint hold it; a trainer has no scales."""
    score: bool = False
    """With a scalar head in place of the output layer: a reward model, a critic."""

    def of(self, table: Table) -> Table:
        """The table without what this form leaves out."""
        if not self.prediction:
            table = replace(table, prediction=None)
        if self.score:
            table = with_score(table)
        return table if self.scales is None else with_scales(table, self.scales)


PLAIN = Form()
SCORED = Form(score=True)


def stored_form(names: Container[str]) -> Form:
    """What a checkpoint with these tensors is: of a language model, or of one with a scalar head."""
    return SCORED if SCORE in names else PLAIN


@dataclass(frozen=True)
class Family:
    """All models of one `model_type`; `table(config)` is the only place that knows their layout."""

    model_type: str
    table: Callable[[Config], Table]

    def logical_tensors(
        self, config: Config, dtype: torch.dtype | None = None, form: Form = PLAIN
    ) -> list[LogicalTensor]:
        """All tensors of the checkpoint in its order, as an engine holds them: in the dtype of the config or, where
        given, `dtype`.

        Weights with a dtype of their own (router biases, quantised matrices and their scales) keep it.
        Raises ConfigError.
        """
        dtype = model_dtype(config) if dtype is None else dtype
        found: list[LogicalTensor] = []
        for layer, block in _blocks(form.of(self.table(config))):
            for weight in block.weights:
                shape, stored = weight.shape, weight.dtype or dtype
                found += [LogicalTensor(name, shape, stored) for name in _names(weight, layer)]
        return found

    def checkpoint_tensors(
        self, config: Config, dtype: torch.dtype | None = None, form: Form = PLAIN
    ) -> list[LogicalTensor]:
        """As `logical_tensors`, but what the engine alone keeps in a wider dtype (GLM's router) is in the model's."""
        dtype = model_dtype(config) if dtype is None else dtype
        widened = {
            name
            for layer, block in _blocks(form.of(self.table(config)))
            for weight in block.weights
            if weight.widened
            for name in _names(weight, layer)
        }
        return [
            replace(tensor, dtype=dtype) if tensor.name in widened else tensor
            for tensor in self.logical_tensors(config, dtype, form)
        ]

    def numel(self, config: Config) -> int:
        """Parameters of the model, without spelling their names out."""
        return sum(prod(weight.shape) * copies for weight, copies in _weights(PLAIN.of(self.table(config))))

    def nbytes(self, config: Config, dtype: torch.dtype, form: Form = PLAIN, checkpoint: bool = False) -> int:
        """Of all `logical_tensors`, with `checkpoint` of all `checkpoint_tensors`, without spelling them out."""
        total = 0
        for weight, copies in _weights(form.of(self.table(config))):
            own = None if checkpoint and weight.widened else weight.dtype
            total += prod(weight.shape) * copies * (own or dtype).itemsize
        return total

    def bucket_extremes(self, config: Config, dtype: torch.dtype, form: Form = PLAIN) -> tuple[int, int]:
        """Bytes that the largest tensor or fused group takes in a bucket, and all tensors in a single one."""
        largest = whole = 0
        for block in {id(block): block for _, block in _blocks(form.of(self.table(config)))}.values():
            sizes = {w.name: aligned(prod(w.shape) * (w.dtype or dtype).itemsize) for w in block.weights}
            groups = [rule.sources for rule in block.engine] + [(name,) for name in sizes]
            for group in groups:
                names = {*group, *map(scale_name, group)} & sizes.keys()
                largest = max(largest, sum(sizes[name] for name in names))
        for weight, copies in _weights(form.of(self.table(config))):
            whole += aligned(prod(weight.shape) * (weight.dtype or dtype).itemsize) * copies
        return largest, whole

    def fused_groups(self, config: Config, form: Form = PLAIN) -> list[tuple[str, ...]]:
        """Names that must travel together, because the engine holds them in one parameter (q|k|v, gate|up) or cannot
        use one without the other (data and scale)."""
        groups = []
        for layer, block in _blocks(form.of(self.table(config))):
            scaled = {scale_name(weight.name) for weight in block.weights} & {weight.name for weight in block.weights}
            for rule in block.engine:
                sources = [name for name in rule.sources if name not in scaled]
                sources += [scale_name(name) for name in sources if scale_name(name) in scaled]
                if len(sources) > 1:
                    experts = range(1 if rule.experts == 0 else rule.experts)
                    groups += [tuple(name.format(layer=layer, expert=each) for name in sources) for each in experts]
        return groups

    def aliases(self, config: Config, form: Form = PLAIN) -> dict[str, str]:
        """Names that some checkpoints carry as a second copy of another tensor: a tied head, what multi-token
        prediction shares with the model."""
        if form.score:
            return {}
        table = self.table(config)
        return ({"lm_head.weight": EMBEDDING} if table.tied else {}) | dict(table.aliases)

    def unused_tensors(self, config: Config, form: Form = PLAIN) -> set[str]:
        """Names that the model's checkpoints have, and `form` has not: the prediction layer of a program without."""
        every = {tensor.name for tensor in self.logical_tensors(config, form=replace(form, prediction=True))}
        return every - {tensor.name for tensor in self.logical_tensors(config, form=form)}

    def megatron_placements(
        self, config: Config, layout: MegatronLayout, rank: int, form: Form = PLAIN
    ) -> list[Placement]:
        """Placements in the parameters of Megatron's global rank `rank`, named as in GPTModel.state_dict(): its
        parameters and persistent buffers (a router's `expert_bias`), but no `_extra_state`.

        Raises:
            ConfigError: the table does not have what the config asks for.
            LayoutError: the model cannot be cut like that.
        """
        te_names = layout.names == ModuleNames.TRANSFORMER_ENGINE
        speller = Speller(layout, rank, lambda block: _named(block.megatron, te_names))
        return speller.placements(form.of(self.table(config)))

    def engine_placements(self, config: Config, layout: EngineLayout, rank: int, form: Form = PLAIN) -> list[Placement]:
        """Placements in the parameters of rank `rank` of one SGLang server, named as in its model's
        named_parameters(); those of a draft model start with `table.DRAFT`, and its embedding and head, which are
        the model's own tensors, are left out. Raises as `megatron_placements`.
        """
        table = form.of(self.table(config))
        table.check_engine(layout)
        return Speller(layout, rank, lambda block: block.engine).placements(table)


def _named(rules: Sequence[Rule], te_names: bool) -> Sequence[Rule]:
    if not te_names:
        return rules
    return [
        rule if rule.transformer_engine is None else replace(rule, parameter=rule.transformer_engine) for rule in rules
    ]


def _blocks(table: Table) -> Iterator[tuple[int, Block]]:
    yield 0, table.first
    yield from enumerate(table.layers)
    yield 0, table.last
    if table.prediction is not None:
        yield len(table.layers), table.prediction


def _weights(table: Table) -> Iterator[tuple[Weight, int]]:
    """Each weight of each layer, and how many tensors it stands for."""
    for _, block in _blocks(table):
        for weight in block.weights:
            yield weight, max(1, weight.experts)


def _names(weight: Weight, layer: int) -> list[str]:
    if not weight.experts:
        return [weight.name.format(layer=layer)]
    return [weight.name.format(layer=layer, expert=expert) for expert in range(weight.experts)]
