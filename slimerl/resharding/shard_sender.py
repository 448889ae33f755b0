"""A trainer rank's parcels: packed from its own parameters when they are due, hashed as they are sent.

Flows in: the rank's share of the plan, its parameters. Flows out: bytes for `Traffic`, a checksum of each parcel, the
digests of what engines must hold. Invariant: a parcel is packed once for a transfer and let go after its last send, so
that few are in memory at a time; nothing of another rank is needed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from slimerl.engine.inside.carry import Step
from slimerl.engine.inside.parcels import Contents, checksum, pack
from slimerl.resharding.shard_proof import SentDigests


class Outbox:
    """`Parcels` of a member that only sends; one for each transfer."""

    def __init__(
        self,
        contents: Contents,
        sent: SentDigests,
        steps: Sequence[Step],
        parameters: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """`device`: where the links take bytes from."""
        self._contents, self._sent, self._parameters, self._device = contents, sent, parameters, device
        self._due = Counter(step.parcel for step in steps)
        self._held: dict[int, torch.Tensor] = {}
        self.checksums: dict[int, int] = {}
        sent.start()

    def outgoing(self, parcel: int) -> torch.Tensor:
        if parcel not in self._held:
            self._held[parcel] = self._packed(parcel)
        return self._held[parcel]

    def _packed(self, parcel: int) -> torch.Tensor:
        segments = self._contents.segments[parcel]
        home = self._parameters[segments[0].name].device
        flat = torch.empty(self._contents.nbytes[parcel], dtype=torch.uint8, device=home)
        pack(flat, segments, self._parameters, self._sent.dtypes)
        self._sent.add(parcel, flat)
        self.checksums[parcel] = checksum(flat)
        return flat.to(self._device)

    def left(self, parcel: int) -> None:
        self._due[parcel] -= 1
        if not self._due[parcel]:
            del self._held[parcel]

    def incoming(self, parcel: int, nbytes: int) -> torch.Tensor:
        raise AssertionError(f"parcel {parcel} of {nbytes} bytes would come to a trainer rank")

    def arrived(self, parcel: int) -> None:
        raise AssertionError(f"parcel {parcel} has come to a trainer rank")
