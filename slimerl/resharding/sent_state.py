"""What the engines were sent last: the state that the next delta changes.

Flows in: buckets of logical tensors as they travel. Flows out: what is different in them; all tensors, for an engine
that has to be rewritten as a whole. Lives in host memory from sync to sync, on the rank that sends: as many bytes as
the engines' weights.
Invariants: after `take` the state has the elements of the bucket, bit for bit; `bases` says what engines hold only
where they were proven to hold just this state.
"""

from collections.abc import Sequence

import torch

from slimerl.engine.inside.delta import Changes, find_changes, units
from slimerl.engine.inside.packed import NamedTensor
from slimerl.engine.inside.patch import Base

_SCATTER_SHARE = 1 / 8
"""Of the elements: where more changed, a copy of all is faster than writing them one by one."""


class SentState:
    """Empty at first: then everything is new."""

    def __init__(self) -> None:
        self.bases: list[Base] | None = None
        """Of each rank of an engine; None: no engine was proven to hold this state."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.buckets: list[list[str]] = []
        """Names, in the order of the last transfer."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def begin(self) -> list[Base] | None:
        """A transfer begins; returns the bases that its deltas are from. The state is no engine's until `commit`."""
        bases, self.bases, self.buckets = self.bases, None, []
        return bases

    def take(self, bucket: Sequence[NamedTensor]) -> dict[str, Changes]:
        """Note a bucket; returns what it changes of each tensor. One that is new, or of another shape, is left out."""
        self.buckets.append([name for name, _ in bucket])
        changes = {}
        for name, tensor in bucket:
            new, old = tensor.detach().to("cpu"), self.tensors.get(name)
            if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                self.tensors[name] = old = torch.empty(new.shape, dtype=new.dtype)
                units(old)[:] = units(new)
                continue
            changes[name] = found = find_changes(units(old), units(new))
            if len(found) < _SCATTER_SHARE * old.numel():
                units(old)[found.positions] += found.steps
            else:
                units(old)[:] = units(new)
        return changes

    def commit(self, bases: list[Base]) -> None:
        """Engines were proven to hold the state."""
        self.bases = bases
