"""`ipc`: engines on the trainer's machine read full tensors out of memory that they share with it.

Flows in: buckets. Flows out: memory that engines map: of the GPU where the weights lie on one that all engines of this
machine see, else of the host; the engine copies from it. Invariant: a bucket's memory is refilled only after every rank
of every engine that is left has answered for its last use; as many memories as buckets in flight alternate.
"""

import logging
import secrets
from collections.abc import Sequence

import torch

from slimerl.engine.fleet import EngineFleet
from slimerl.engine.inside.cuda_bucket import DeviceBucket, why_not_on_device
from slimerl.engine.inside.packed import Entry, NamedTensor
from slimerl.engine.inside.shared_bucket import SharedBucket
from slimerl.engine.inside.weight_group import is_this_machine
from slimerl.resharding.transports.carrier import IN_FLIGHT, Carrier, SourceOfRank

logger = logging.getLogger(__name__)


class IpcCarrier(Carrier):
    """Engines on other machines are set aside at once: they cannot see this machine's memory."""

    def __init__(self, fleet: EngineFleet, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(fleet, timeout_s)
        self._session = secrets.token_bytes(16)
        self._bucket_bytes = bucket_bytes
        self.memories: Sequence[SharedBucket | DeviceBucket] = ()
        """Made for the first bucket, which shows where the weights lie."""
        for engine_id, host in fleet.hosts.items():
            if not is_this_machine(host):
                fleet.set_aside(
                    engine_id,
                    f"{engine_id} runs on {host}, and sync.transport ipc reaches this machine alone; "
                    "set sync.transport to broadcast",
                )

    def _dispose(self) -> None:
        """An engine that hangs keeps its view of the memory; nobody can open it any more."""
        for memory in self.memories:
            memory.close()

    def _stage(self, number: int, bucket: Sequence[NamedTensor]) -> tuple[SourceOfRank, list[Entry]]:
        if not self.memories:
            self.memories = self._make_memories(bucket[0][1].device)
        memory = self.memories[number % IN_FLIGHT]
        tag = self._session + number.to_bytes(8, "little")
        entries = memory.fill(tag, bucket)
        if isinstance(memory, DeviceBucket):
            return lambda: {"kind": "device", "bucket": memory.address(), "tag": tag.hex()}, entries
        return lambda: {"kind": "shared", "bucket": memory.address, "tag": tag.hex()}, entries

    def _make_memories(self, device: torch.device) -> Sequence[SharedBucket | DeviceBucket]:
        if device.type != "cuda":
            return [SharedBucket(self._bucket_bytes) for _ in range(IN_FLIGHT)]
        seen = {engine_id: [report["gpus"] for report in ranks] for engine_id, ranks in self.describe().items()}
        if reason := why_not_on_device(device, seen):
            logger.warning("weights go through host memory: %s", reason)
            return [SharedBucket(self._bucket_bytes) for _ in range(IN_FLIGHT)]
        return [DeviceBucket(self._bucket_bytes, device) for _ in range(IN_FLIGHT)]
