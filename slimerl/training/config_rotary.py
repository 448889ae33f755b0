"""Rotary position embeddings as `config.json` states them.

Flows in: a `ConfigReader`. Flows out: a `Rotary`, and Megatron's arguments. transformers 5 writes `rope_parameters`;
older files have `rope_theta` and `rope_scaling`. Invariant: a scaling that Megatron computes otherwise is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimerl.training.config_reader import ConfigReader, UnsupportedModel


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


def read_rotary(config: ConfigReader, partial: float | None = None) -> Rotary:
    """`partial`: the family's default of `partial_rotary_factor`; None: the family rotates whole heads.

    Raises:
        UnsupportedModel: contradicting keys.
    """
    stated = config.get("rope_parameters", {})
    older = config.get("rope_scaling", {})
    scaling = stated or older
    theta = config.get("rope_theta")
    base = stated.get("rope_theta", 10_000.0 if theta is None else theta)
    if theta is not None and base != theta:
        raise UnsupportedModel(f"config.json: rope_theta is {theta} and in rope_parameters {base}")
    percent = config.number("partial_rotary_factor", stated.get("partial_rotary_factor", partial or 1.0))
    if stated.get("partial_rotary_factor", percent) != percent:
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor is {percent} and in rope_parameters {stated['partial_rotary_factor']}"
        )
    if partial is None and percent != 1:
        raise UnsupportedModel(f"config.json: partial_rotary_factor = {percent} is not supported, only 1")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    named = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    rest = {key: value for key, value in scaling.items() if key not in named}
    return Rotary(float(base), percent, kind, rest, "rope_parameters" if stated else "rope_scaling")


def llama3_factor(rotary: Rotary) -> float | None:
    """Llama 3's scaling factor, None for plain embeddings. Raises UnsupportedModel for any other scaling."""
    if rotary.kind == "default" and not rotary.scaling:
        return None
    fixed = {key: value for key, value in rotary.scaling.items() if key != "factor"}
    if rotary.kind != "llama3" or fixed != LLAMA3_IN_MEGATRON:
        raise UnsupportedModel(f"config.json: {_told(rotary)} is not supported here")
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
