"""`delta`: engines get only the elements that changed since the version that they hold; for slow links.

Flows in: buckets, the state that was sent last (`SentState`). Flows out: for each engine rank a patch of just its part
(`engine/inside/patch.py`), which the rank fetches from the store that it reports to: no memory is shared, no further
port is open. Invariants: an engine gets changes only where it was proven to hold the state that they were made of;
every other, a new or restarted one, gets all elements; one that refuses a patch, or is not proven afterwards, is
rewritten as a whole in the same sync, out of the state, before it is given up.

Why not through the model's `load_weights`: that takes whole tensors. Patches are written by the plan's placements,
which the proof has to match anyway. A whole rewrite also clears the padding; changes leave it alone.
"""

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from slimerl.engine.client import EngineClient
from slimerl.engine.fleet import EngineFleet
from slimerl.engine.inside.delta import Changes
from slimerl.engine.inside.packed import NamedTensor
from slimerl.engine.inside.patch import PIECE_BYTES, Base, Parcel, base_of
from slimerl.resharding.patches import PatchWriter
from slimerl.resharding.proof import ProofError, WeightProof
from slimerl.resharding.sent_state import SentState
from slimerl.resharding.tensors import Placement
from slimerl.resharding.transports.carrier import IN_FLIGHT, Carrier, NothingSent, Reports, Sent
from slimerl.resilience.deadline import Deadline

logger = logging.getLogger(__name__)


class DeltaCarrier(Carrier):
    """Until `check` has asked the engines what they hold, all of them get everything."""

    def __init__(
        self,
        fleet: EngineFleet,
        state: SentState,
        placements: Sequence[Sequence[Placement]],
        timeout_s: float,
        transfer: Deadline,
    ) -> None:
        """
        Args:
            placements: of each rank of an engine.
            transfer: until when engines may be rewritten that refused a patch.
        """
        super().__init__(fleet, timeout_s)
        self.state = state
        self.wire_bytes = 0
        """Of all patches, each counted once, however many engines fetch it."""
        self._bases = state.begin()
        self._session = secrets.token_hex(8)
        self._transfer = transfer
        self._patches = PatchWriter(placements, state)
        self._changing: set[str] = set()
        """Engines that get changes."""
        self._refused: dict[str, str] = {}
        """Engines that refused a patch, and why."""
        self._published: dict[int, list[str]] = {}

    def describe(self) -> dict[str, Reports]:
        described = super().describe()
        self._changing = {
            engine_id
            for engine_id, ranks in described.items()
            if self._bases is not None and [report["holds"] for report in ranks] == self._bases
        }
        return described

    def send(self, bucket: Sequence[NamedTensor]) -> None:
        if not bucket:
            raise NothingSent("a bucket without tensors; split_into_buckets makes none")
        self._patches.check_placed(name for name, _ in bucket)
        self._make_room()
        changes = self.state.take(bucket)
        self._shapes |= {name: list(tensor.shape) for name, tensor in bucket}
        left = set(self.fleet.left) - self._refused.keys()
        self._dispatch([name for name, _ in bucket], changes, left & self._changing, left - self._changing)

    def accept(self, reports: Mapping[str, Reports]) -> None:
        for engine_id, ranks in reports.items():
            if refused := [f"rank {rank}: {one['refused']}" for rank, one in enumerate(ranks) if "refused" in one]:
                self._refused.setdefault(engine_id, "; ".join(refused))
        self.fleet.check_some_left()

    def prove(self, version: int, placements: Sequence[Sequence[Placement]], proof: WeightProof) -> list[str]:
        self.wait()
        self._rewrite(self._refused)
        wrong = self._unproven(version, placements, proof)
        again = {engine_id: why for engine_id, why in wrong.items() if engine_id in self._changing}
        self._set_aside({engine_id: why for engine_id, why in wrong.items() if engine_id not in again})
        if again:
            self._rewrite(again)
            self._set_aside(self._unproven(version, placements, proof))
        logger.info("version %d: %d bytes in patches, of %d of weights", version, self.wire_bytes, self.state.nbytes)
        return self.fleet.left

    def _unproven(self, version: int, placements: Sequence[Sequence[Placement]], proof: WeightProof) -> dict[str, str]:
        """Engines that do not hold what was sent, and why. What the others hold is what the next delta changes."""
        wrong = {}
        for engine_id, reports in self.verify(version, placements, proof.granules).items():
            try:
                proof.check(engine_id, reports)
            except ProofError as error:
                wrong[engine_id] = str(error)
            else:
                self.state.commit([base_of(version, digests) for digests in reports])
        return wrong

    def _rewrite(self, refused: Mapping[str, str]) -> None:
        """Send everything to these engines. Those that refuse again, or come too late, are set aside."""
        why = dict(refused)
        self._changing -= why.keys()
        self._refused = {}
        for engine_id, reason in why.items():
            logger.warning("%s is rewritten as a whole: %s", engine_id, reason)
        for names in self.state.buckets:
            receivers = why.keys() & set(self.fleet.left) - self._refused.keys()
            if receivers and self._transfer.remaining_s <= 0:
                late = "no time is left to rewrite it; raise deadlines.sync_s"
                self._refused |= {engine_id: f"{why[engine_id]}; {late}" for engine_id in receivers}
            elif receivers:
                self._make_room()
                self._dispatch(names, {}, set(), receivers)
        self.wait()
        self._set_aside({engine_id: f"{engine_id} {reason}" for engine_id, reason in self._refused.items()})

    def _set_aside(self, engines: Mapping[str, str]) -> None:
        for engine_id, why in engines.items():
            self.fleet.set_aside(engine_id, why)
        self.fleet.check_some_left()

    def _make_room(self) -> None:
        while len(self._in_flight) >= IN_FLIGHT:
            self._settle_oldest()

    def _settled(self, number: int) -> None:
        for key in self._published.pop(number):
            self.desk.withdraw(key)

    def _dispose(self) -> None:
        for number in list(self._published):
            self._settled(number)

    # --- one bucket

    def _dispatch(
        self, names: Sequence[str], changes: Mapping[str, Changes], changing: set[str], whole: set[str]
    ) -> None:
        """Publish a bucket's patches and tell each receiver of its own."""
        number = self._buckets
        self._buckets += 1
        self._published[number] = []
        told: dict[str, list[dict[str, Any]]] = {}
        if changing:
            assert self._bases is not None
            told |= dict.fromkeys(changing, self._announce(number, self._patches.changing(names, changes), self._bases))
        if whole:
            told |= dict.fromkeys(whole, self._announce(number, self._patches.whole(names)))

        async def tell(client: EngineClient) -> Reports:
            messages = told.get(client.engine_id)
            return [] if messages is None else await self.ask(client, lambda rank: messages[rank])

        self._in_flight.append(Sent(number, self.fleet.start(tell)))

    def _announce(
        self, number: int, patches: Sequence[bytearray], bases: Sequence[Base] | None = None
    ) -> list[dict[str, Any]]:
        """Publish a patch for each rank; returns the message for each."""
        messages = []
        for rank, patch in enumerate(patches):
            form = "whole" if bases is None else "changes"
            pieces = [memoryview(patch)[at : at + PIECE_BYTES] for at in range(0, len(patch), PIECE_BYTES)]
            keys = [self.desk.publish(f"patch-{number}/{form}/{rank}/{at}", piece) for at, piece in enumerate(pieces)]
            self._published[number] += keys
            self.wire_bytes += len(patch)
            parcel: Parcel = {"keys": keys, "nbytes": len(patch), "sha256": hashlib.sha256(patch).hexdigest()}
            base = None if bases is None else bases[rank]
            messages.append({"op": "patch", "session": self._session, "number": number, "base": base, "parcel": parcel})
        return messages
