"""Which experts an engine chose for the tokens that it computed, as SGLang tells it (`return_routed_experts`). Pure.

Flows in: the `meta_info` of an answer. Flows out: a row for each token, or that there is none.
Invariant: rows are of consecutive tokens, from the one that was asked for to the last but one: the last token that is
generated was never computed. Tokens whose KV the engine had cached have the rows of the request that computed them.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

FIELD = "routed_experts"
_WIRE = np.dtype("<i4")
_KEPT = np.int16
"""Of the ids; models have some hundreds of experts."""


class RoutedExpertsError(ValueError):
    """The record is not one of these tokens."""


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """`rows` [tokens, layers * experts per token] int16, of the tokens from place `first` on; dense layers are counted
    and have zeros."""

    first: int
    rows: np.ndarray


def asked_from(first: int) -> dict[str, Any]:
    """Fields of a /generate request that ask for the record of the tokens from place `first` on."""
    return {"return_routed_experts": True, "routed_experts_start_len": first}


def read_routed_experts(meta: Mapping[str, Any], first: int, tokens: int) -> RoutedExperts | None:
    """The record in an answer.

    Args:
        first: as it was asked for.
        tokens: of the input and of the answer together.

    Returns:
        None: there is none. SGLang has none of a request that ended while it waited.

    Raises:
        RoutedExpertsError: it has another number of tokens.
    """
    text = meta.get(FIELD)
    count = tokens - 1 - first
    if not text or count < 1:
        return None
    try:
        ids = np.frombuffer(base64.b64decode(text, validate=True), dtype=_WIRE)
    except (binascii.Error, ValueError, TypeError) as error:
        raise RoutedExpertsError(f"meta_info.{FIELD} cannot be read: {error}") from None
    if len(ids) == 0 or len(ids) % count:
        raise RoutedExpertsError(f"meta_info.{FIELD} has {len(ids)} entries, which do not divide by {count} tokens")
    if ids.min() < 0 or ids.max() > np.iinfo(_KEPT).max:
        raise RoutedExpertsError(f"meta_info.{FIELD} has the expert {ids.min()} or {ids.max()}, which none can be")
    return RoutedExperts(first, ids.astype(_KEPT).reshape(count, -1))
