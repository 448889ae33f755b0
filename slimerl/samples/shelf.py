"""Payloads of the sample store, apart from its metadata: of finished samples all there is, of unfinished ones what the
journal has. Pure.

Invariant: `size` is the bytes of all payloads on the shelf.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slimerl.samples.messages import SamplePayload, SavedSample
from slimerl.samples.sample import Sample

PARTIAL_GROWTH = 1.5
"""An interrupted sample is journaled again once it has grown by this factor: all its chunks together cost three times
its length."""


@dataclass
class PayloadShelf:
    size: int = 0
    _finished: dict[str, SavedSample] = field(default_factory=dict)
    _begun: dict[str, int] = field(default_factory=dict)
    """Response tokens of unfinished samples in the journal."""

    def put(self, sample: Sample) -> SavedSample:
        """A sample that has its reward; nothing is added to it any more."""
        saved = self._finished[sample.sample_id] = sample.saved()
        self.size += saved.payload.size
        self._begun.pop(sample.sample_id, None)
        return saved

    def is_due(self, sample: Sample) -> bool:
        """Has the unfinished sample much more than the journal? It is taken to have it then."""
        length = len(sample.response_tokens)
        if length <= PARTIAL_GROWTH * self._begun.get(sample.sample_id, 0):
            return False
        self._begun[sample.sample_id] = length
        return True

    def end(self, sample_id: str) -> None:
        self._begun.pop(sample_id, None)
        if (saved := self._finished.pop(sample_id, None)) is not None:
            self.size -= saved.payload.size

    def finished(self, sample_ids: Iterable[str]) -> list[SavedSample]:
        """Those of the samples that are."""
        return [self._finished[sample_id] for sample_id in sample_ids if sample_id in self._finished]

    def journaled(self, sample_ids: Iterable[str]) -> list[str]:
        """Those of the samples whose payload, or some of it, is in the journal."""
        return [sample_id for sample_id in sample_ids if sample_id in self._finished or sample_id in self._begun]

    def payloads(self, sample_ids: Sequence[str], at_most_bytes: float) -> list[SamplePayload]:
        """Of finished samples, in the order asked for: the first alone, and those behind it that fit."""
        found: list[SamplePayload] = []
        left = at_most_bytes
        for sample_id in sample_ids:
            payload = self._finished[sample_id].payload
            left -= payload.size
            if left < 0 and found:
                break
            found.append(payload)
        return found
