"""Rotary position embeddings as `config.json` states them.

Flows in: a `ConfigReader`. Flows out: a `Rotary`, and Megatron's arguments. transformers 5 writes `rope_parameters`;
older files have `rope_theta` and `rope_scaling`. Invariant: a scaling that Megatron computes otherwise is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimerl.training.config_reader import ConfigReader, UnsupportedModel, as_number, at_least


@dataclass(frozen=True)
class Rotary:
    """`scaling`: the parameters of a stretched context, empty for plain embeddings; `kind` says of which sort."""

    base: float
    percent: float
    """Share of a head's width that is rotated."""
    kind: str
    """`default`, `llama3` or `yarn`."""
    scaling: Mapping[str, Any]
    stated_in: str
    """The key that has them."""


LLAMA3_IN_MEGATRON = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of megatron-core; only the factor can be chosen."""

YARN_KEYS = frozenset(
    ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
)

NUMBERS = (YARN_KEYS | LLAMA3_IN_MEGATRON.keys()) - {"truncate"}


def read_rotary(config: ConfigReader, partial: float | None = None) -> Rotary:
    """`partial`: the family's default of `partial_rotary_factor`; None: the family rotates whole heads.

    Raises:
        UnsupportedModel: keys that contradict each other, or are of another type than rotary embeddings have.
    """
    stated, older = _stated(config, "rope_parameters"), _stated(config, "rope_scaling")
    base = _number(config, "rope_theta", stated, older)
    if base is not None:
        at_least(1, "rope_theta", base)
    percent = _number(config, "partial_rotary_factor", stated, older)
    if percent is not None and not 0 < percent <= 1:
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor = {percent} is no share of a head, above 0 and up to 1"
        )
    if partial is None and percent not in (None, 1.0):
        raise UnsupportedModel(f"config.json: partial_rotary_factor = {percent} is not supported, only 1")
    if stated and older and _scaling(stated) != _scaling(older):
        raise UnsupportedModel(
            f"config.json: rope_parameters and rope_scaling contradict each other ({_shown(stated)} and "
            f"{_shown(older)}); leave out the one that is not meant"
        )
    kind, rest = _scaling(stated or older)
    return Rotary(
        10_000.0 if base is None else base,
        (partial or 1.0) if percent is None else percent,
        kind,
        rest,
        "rope_parameters" if stated else "rope_scaling",
    )


def _stated(config: ConfigReader, key: str) -> Mapping[str, Any]:
    """Of an object; empty where it is absent."""
    value = config.get(key, {})
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"config.json: {key} = {value!r} is not an object")
    kinds = {str(value[name]) for name in ("rope_type", "type") if value.get(name) is not None}
    if len(kinds) > 1:
        raise UnsupportedModel(f"config.json: {key} has two types, {' and '.join(sorted(kinds))}; leave one out")
    for name in NUMBERS & value.keys():
        if value[name] is not None:
            _check_size(f"{key}: {name}", name, as_number(f"{key}: {name}", value[name]))
    if not isinstance(value.get("truncate") or False, bool):
        raise UnsupportedModel(f"config.json: {key}: truncate = {value['truncate']!r} is neither true nor false")
    return value


def _check_size(told: str, name: str, value: float) -> None:
    """Of a context that is stretched: how much, and how long it was."""
    if name in ("factor", "original_max_position_embeddings"):
        at_least(1, told, value)
    if name == "original_max_position_embeddings" and value != int(value):
        raise UnsupportedModel(f"config.json: {told} = {value:g} is no whole number; correct it")


def _number(config: ConfigReader, key: str, *objects: Mapping[str, Any]) -> float | None:
    """The value on which all places agree that state it, the file itself and its objects; None: no place does."""
    found = [config.get(key), *(each.get(key) for each in objects)]
    values = [value for value in found if value is not None]
    for value in values:
        as_number(key, value)
        if value != values[0]:
            raise UnsupportedModel(f"config.json: {key} is {values[0]} and in rope_parameters or rope_scaling {value}")
    return float(values[0]) if values else None


def _scaling(stated: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The sort of scaling and its parameters."""
    kind = stated.get("rope_type") or stated.get("type") or "default"
    named = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    return str(kind), {key: value for key, value in stated.items() if key not in named}


def _shown(stated: Mapping[str, Any]) -> str:
    kind, rest = _scaling(stated)
    return f"{kind} {rest}" if rest else kind


def check_rotated(width: int, percent: float) -> None:
    """Raises UnsupportedModel where there is no room for pairs of elements: an odd share is rounded up to them.

    Args: `width`: of what may be rotated of a head; `percent`: share of it that is.
    """
    rotated = int(width * percent)
    if not rotated or rotated + rotated % 2 > width:
        raise UnsupportedModel(
            f"config.json: {rotated} of {width} elements of a head are rotated (head_dim or qk_rope_head_dim), but "
            "rotary embeddings turn pairs of them; correct that"
        )


def llama3_factor(rotary: Rotary) -> float | None:
    """Llama 3's scaling factor, None for plain embeddings. Raises UnsupportedModel for any other scaling."""
    if rotary.kind == "default" and not rotary.scaling:
        return None
    fixed = {key: value for key, value in rotary.scaling.items() if key != "factor"}
    if rotary.kind != "llama3" or fixed != LLAMA3_IN_MEGATRON:
        raise UnsupportedModel(f"config.json: {_told(rotary)} is not supported here")
    if rotary.scaling.get("factor") is None:
        raise UnsupportedModel(f"config.json: {_told(rotary)} has no factor; say how far it stretches")
    return float(rotary.scaling["factor"])


def latent_rotary(rotary: Rotary) -> dict[str, Any]:
    """Arguments of MLATransformerConfig. Raises UnsupportedModel for a scaling other than YaRN."""
    common = {"rotary_base": rotary.base, "rotary_percent": rotary.percent}
    if rotary.kind == "default" and not rotary.scaling:
        # the attention's own scale looks at the factor also where nothing is stretched
        return common | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    given = {key: value for key, value in rotary.scaling.items() if value is not None}
    required = {"factor", "original_max_position_embeddings"}
    if rotary.kind != "yarn" or given.keys() - YARN_KEYS or required - given.keys() or not given.get("truncate", True):
        raise UnsupportedModel(
            f"config.json: {_told(rotary)} is not supported with latent attention, only yarn with "
            f"{', '.join(sorted(YARN_KEYS))} (truncate: true)"
        )
    # The magnitude of queries and keys is m(mscale) / m(mscale_all_dim), m(x) = 0.1 x ln(factor) + 1; where one of
    # the two is absent or zero it is m(1). The attention's scale is multiplied by m(mscale_all_dim)².
    mscale, all_dim = given.get("mscale") or 0.0, given.get("mscale_all_dim") or 0.0
    if all_dim and not mscale:
        raise UnsupportedModel(f"config.json: {_told(rotary)} has mscale_all_dim, but no mscale")
    return common | {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(given["factor"]),
        "original_max_position_embeddings": int(given["original_max_position_embeddings"]),
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "mscale": float(mscale) if all_dim else 1.0,
        "mscale_all_dim": float(all_dim),
    }


def _told(rotary: Rotary) -> str:
    scaling = {"type": rotary.kind, **rotary.scaling}
    return f"{rotary.stated_in}: rotary scaling {scaling}"
