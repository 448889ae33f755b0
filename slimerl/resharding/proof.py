"""The proof of a sync: what each engine rank must hold, as digests, compared with what it reports.

Flows in: logical tensors, the placements of every engine rank, the tensors as they are sent, the ranks' reports.
Flows out: nothing, or a `ProofError`. Invariant: every element of every tensor that a rank holds is in the proof;
it holds for any number of engines of one layout.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from slimerl.engine.inside.digest import digest, granule
from slimerl.resharding.boxes import Box
from slimerl.resharding.coverage import owned_placements, some_names
from slimerl.resharding.tensors import LogicalTensor, Placement

_MODULUS = 1 << 64


class ProofError(RuntimeError):
    """An engine rank does not hold what was sent."""


def digest_granules(tensors: Sequence[LogicalTensor], ranks: Iterable[Sequence[Placement]]) -> dict[str, int]:
    """Bytes of a digest's word for each tensor: the most that respect the cuts of all these ranks, of either side."""
    cuts: dict[str, set[int]] = {}
    for placements in ranks:
        for placement in placements:
            if placement.box.starts:
                ends = (placement.box.starts[-1], placement.box.stops[-1])
                cuts.setdefault(placement.tensor, set()).update(ends)
    return {tensor.name: granule(tensor.shape, tensor.dtype.itemsize, cuts.get(tensor.name, ())) for tensor in tensors}


class WeightProof:
    """One sync's proof: hash what is sent, bucket by bucket, then compare with each engine's report.

    Example::

        proof = WeightProof(tensors, engine_ranks)      # engine_ranks[r]: placements of rank r
        for bucket in buckets: ...send...; proof.add(name, tensor)
        proof.check("engine-0", reports)                # reports[r]: {tensor: digest of what rank r holds of it}
    """

    def __init__(self, tensors: Sequence[LogicalTensor], engine_ranks: Sequence[Sequence[Placement]]) -> None:
        """Raises CoverageError where the engine's ranks together leave out a part of a tensor."""
        owned_placements(engine_ranks, tensors)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self.granules = digest_granules(tensors, engine_ranks)
        """Bytes of a digest's word, for each tensor: the engine must use the same."""
        self._holders: dict[str, dict[Box, list[int]]] = {tensor.name: {} for tensor in tensors}
        for rank, placements in enumerate(engine_ranks):
            for placement in placements:
                if not placement.is_padding:
                    self._holders[placement.tensor].setdefault(placement.box, []).append(rank)
        self._expected: list[dict[str, int]] = [{} for _ in engine_ranks]
        self._added: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hash a whole logical tensor as it is sent; each box that engine ranks hold is hashed once.

        Raises:
            ProofError: the tensor is none of the plan, was added before, or is not of its shape and dtype.
        """
        planned = self._tensors.get(name)
        if planned is None or (tuple(tensor.shape), tensor.dtype) != (planned.shape, planned.dtype):
            raise ProofError(f"{name} is sent as {tensor.dtype} {tuple(tensor.shape)}; the plan has {planned}")
        if name in self._added:
            raise ProofError(f"{name} is sent twice")
        self._added.add(name)
        for box, ranks in self._holders[name].items():
            bounds = (box.starts, box.stops)
            value = digest(tensor[box.slices], name, planned.shape, bounds, self.granules[name])
            for rank in ranks:
                held = self._expected[rank]
                held[name] = (held.get(name, 0) + value) % _MODULUS

    def check(self, engine: str, reports: Sequence[Mapping[str, int]]) -> None:
        """Compare one engine's reports, one for each rank: the digest of what the rank holds of each tensor.

        Raises:
            ProofError: names the engine, the rank and the tensors that differ, are missing or were never sent.
        """
        if unsent := self._tensors.keys() - self._added:
            raise ProofError(f"tensors were never sent: {some_names(unsent)}")
        compare_digests(engine, self._expected, reports)


def compare_digests(
    engine: str, expected_of: Sequence[Mapping[str, int]], reports: Sequence[Mapping[str, int]]
) -> None:
    """One engine's ranks: what each must hold of each tensor, and what it says it holds. Raises ProofError."""
    if len(reports) != len(expected_of):
        raise ProofError(f"{engine} has {len(expected_of)} ranks, {len(reports)} reported")
    for rank, (expected, found) in enumerate(zip(expected_of, reports, strict=True)):
        if missing := expected.keys() ^ found.keys():
            raise ProofError(f"{engine} rank {rank} and the plan disagree about what it holds: {some_names(missing)}")
        wrong = [name for name, value in expected.items() if found[name] != value]
        if wrong:
            raise ProofError(f"{engine} rank {rank} does not hold what was sent of {some_names(wrong)}")
