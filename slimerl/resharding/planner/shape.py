"""What a plan depends on: model, layouts, machines, options.

Flows in: values. Flows out: a key that equal inputs share. Invariant: nothing else enters a plan, so that every rank
that makes it has the same one.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slimerl.resharding.families.family import PLAIN, Form
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.planner.topology import Topology

REVISION = 2
"""Part of every key: raise it when equal inputs give another plan."""


@dataclass(frozen=True)
class PlanOptions:
    """How finely a plan cuts."""

    operations_per_nic: int = 798
    """Of an engine, sent and received together; the parcels are made as large as this asks."""
    least_parcel_bytes: int = 1 << 20
    """Below this an operation costs more than its bytes; smaller tensors are packed."""
    most_parcel_bytes: int = 1 << 28
    """Bounds the buffers of a rank: two parcels each way."""
    granule_rows: int = 128
    """A tensor is split at multiples of this many rows: a block of FP8."""
    class_copies_below: float = 0.6
    """The trainer sends a copy to each class of nodes while its NICs are busy for less than this part of the time."""
    ring_copies_below: float = 0.3
    """And one copy to each of several shorter rings below this: they fill and empty faster."""
    shortest_ring: int = 4
    windows: int = 1
    """Groups of layers that arrive one after another: with more, less staging memory, but smaller parcels."""
    last_turn_pieces: int = 4
    """Parcels of the last turn are cut into this many."""


@dataclass(frozen=True)
class SyncShape:
    """All that a plan depends on."""

    config: Mapping[str, Any]
    """config.json"""
    train: MegatronLayout
    engine: EngineLayout
    topology: Topology
    dtype: torch.dtype = torch.bfloat16
    """Of weights that are not quantised and have no dtype of their own."""
    form: Form = PLAIN
    """As the engine holds the model: with FP8 scales, with the multi-token-prediction layer."""
    options: PlanOptions = PlanOptions()

    @property
    def key(self) -> str:
        """Digest of everything, living replicas and NIC speeds included."""
        fixed = REVISION, json.dumps(self.config, sort_keys=True, default=str), self.dtype
        parts = (*fixed, self.form, self.train, self.engine, self.topology, self.options)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
