"""Where the rows of each Hugging Face tensor lie in Megatron's distributed tensors.

Such a checkpoint knows whole tensors and not ranks: it is what a single rank would hold, so the families' tables
answer for one rank. Flows in: a config.json. Flows out: a `Blueprint`. Invariant: every tensor of the model lies in
exactly one parameter, in ranges of whole rows; the ranges of a parameter tile it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slimerl.resharding.boxes import Box
from slimerl.resharding.families import family_of
from slimerl.resharding.families.family import Form
from slimerl.resharding.layouts import MegatronLayout, ModuleNames
from slimerl.resharding.tensors import LogicalTensor, Placement

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(linear_fc[12]\.weight)(\d+)")
_FUSED_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""Megatron's own layers save their norms under the names that Transformer Engine's fused layers have."""


class Rows(NamedTuple):
    """Rows `first` to `last` of Hugging Face tensor `tensor` lie in the parameter from its row `at` on."""

    tensor: str
    first: int
    last: int
    at: int


class Key(NamedTuple):
    """A tensor of the distributed checkpoint, and which slice of its leading dimensions is meant."""

    name: str
    lead: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One parameter of Megatron's model, as a slice of a distributed tensor."""

    shape: tuple[int, ...]
    key: Key
    lead_sizes: tuple[int, ...]
    spellings: tuple[str, ...]
    """Other names of the distributed tensor: Megatron's own layers and Transformer Engine's name some norms apart."""
    others: tuple[Key, ...]
    """Where else it may stand in a checkpoint: layer by layer, or all layers in one."""
    rows: tuple[Rows, ...]

    @property
    def names(self) -> list[Key]:
        """Every place where it may stand, the likeliest first."""
        return [self.key, *(Key(name, self.key.lead) for name in self.spellings), *self.others]


@dataclass(frozen=True)
class Blueprint:
    """A model in both formats."""

    tensors: Mapping[str, LogicalTensor]
    """By Hugging Face name; their dtypes are those of config.json, and a checkpoint's may be others."""
    parameters: Sequence[Parameter]
    holder: Mapping[str, Parameter]
    """The parameter that holds a tensor, by Hugging Face name."""
    rows: Mapping[str, Sequence[Rows]]
    """Where in it, from the tensor's first row to its last."""


def blueprint(config: Mapping[str, Any], prediction: bool) -> Blueprint:
    """Of the model of this config.json; `prediction`: with its multi-token-prediction layer.

    Raises:
        ConfigError: the family's table does not have what the config asks for.
    """
    family, form = family_of(config), Form(prediction=prediction)
    tensors = {tensor.name: tensor for tensor in family.checkpoint_tensors(config, form=form)}
    by_kind = {
        names: family.megatron_placements(config, MegatronLayout(names=names), 0, form)
        for names in (ModuleNames.TRANSFORMER_ENGINE, ModuleNames.LOCAL)
    }
    local = {place.tensor: place.parameter for place in by_kind[ModuleNames.LOCAL]}
    placed: dict[str, list[Placement]] = {}
    for place in by_kind[ModuleNames.TRANSFORMER_ENGINE]:
        placed.setdefault(place.parameter, []).append(place)
    # Megatron makes one tensor of all layers where these are alike; a list of sparse layers says that they may not be
    stacked = not any(_EXPERT.fullmatch(name) for name in placed)
    keys = {name: _keys(name, stacked) for name in placed}
    sizes: dict[str, tuple[int, ...]] = {}
    for key, _ in keys.values():
        known = sizes.get(key.name, (0,) * len(key.lead))
        sizes[key.name] = tuple(max(size, index + 1) for size, index in zip(known, key.lead, strict=True))
    parameters = []
    for name, places in placed.items():
        key, other = keys[name]
        spellings = _spellings(name, local[places[0].tensor])
        own = tuple(_keys(each, stacked)[0].name for each in spellings)
        others = (other, *(_keys(each, not stacked)[0] for each in spellings)) if other is not None else ()
        ordered = tuple(sorted(map(_rows, places), key=lambda rows: rows.at))
        last = max(places, key=lambda place: place.at.stops[0])
        shape = (last.at.stops[0], *last.at.shape[1:])
        parameters.append(Parameter(shape, key, sizes[key.name], own, others, ordered))
    holder = {rows.tensor: parameter for parameter in parameters for rows in parameter.rows}
    by_tensor: dict[str, list[Rows]] = {name: [] for name in holder}
    for parameter in parameters:
        for rows in parameter.rows:
            by_tensor[rows.tensor].append(rows)
    return Blueprint(tensors, parameters, holder, by_tensor)


def _keys(parameter: str, stacked: bool) -> tuple[Key, Key | None]:
    """Where a parameter stands, and where it would stand if layers were not, or were, one tensor; None: the same."""
    name, lead = parameter, tuple[int, ...]()
    if expert := _EXPERT.fullmatch(name):
        name, lead = f"{expert[1]}experts.{expert[2]}", (int(expert[3]),)
    by_layer = Key(name, lead)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return by_layer, None
    in_one = Key(f"decoder.layers.{layer[2]}", (int(layer[1]), *lead))
    return (in_one, by_layer) if stacked else (by_layer, in_one)


def _spellings(name: str, local: str) -> list[str]:
    """Further names under which Megatron's layers save a parameter."""
    if _EXPERT.fullmatch(name):
        return []
    saved = local
    for own, fused in _FUSED_NORMS.items():
        saved = saved.replace(own, fused)
    return [each for each in dict.fromkeys((local, saved)) if each != name]


def _rows(place: Placement) -> Rows:
    columns = Box.whole(place.box.shape).stops[1:]
    if place.is_padding or place.box.starts[1:] != (0,) * len(columns) or place.box.stops[1:] != columns:
        raise AssertionError(f"{place} is no range of whole rows, though a single rank holds all")
    return Rows(place.tensor, place.box.starts[0], place.box.stops[0], place.at.starts[0])
