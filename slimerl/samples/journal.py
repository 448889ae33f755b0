"""The journal of the sample store: every transition that a process which takes over must know of. Pure: no files.

Flows in: `Record`s in the order of what happened. Flows out: frames of bytes, and from the frames of a process that
ended, however it ended, a `Recovered`: what the store held, which batches were leased, which weights engines served.

Metadata and payload are written once each. A journal is cut into segments; each begins with `Books`, the metadata of
all that lives at that point, so that a segment whose payloads all belong to ended samples is of no use any more.

Invariants:
    a record is noted before anybody outside learns of what it says, so that what the trainer was handed is leased, and
    what it acknowledged is trained, in the books of the process that takes over;
    a frame that was being written when the process ended counts as not there; any other that is not as it was written
    is an error, never a smaller store.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slimerl.samples.messages import RolloutState, SavedGroup, SavedSample

_HEADER = struct.Struct("<II")
"""Bytes of the record, and their CRC-32 ..."""
_OF_HEADER = struct.Struct("<I")
"""... and that of these two: a length that has changed would pass for a frame that was cut off."""


class JournalDamaged(ValueError):
    """It cannot be taken over from; the message says where, and what to do."""


class Admitted(msgspec.Struct, frozen=True, tag="a", array_like=True):
    """`drawn`: the prompt is a new one; false: the group is of an earlier process."""

    group_id: str
    version: int
    sample_ids: list[str]
    drawn: bool = True


class Joined(msgspec.Struct, frozen=True, tag="j", array_like=True):
    group_id: str
    sample_id: str


class Begun(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """What an interrupted sample has so far."""

    group_id: str
    sample: SavedSample


class Finished(msgspec.Struct, frozen=True, tag="f", array_like=True):
    """A sample with its reward."""

    group_id: str
    sample: SavedSample


class Dropped(msgspec.Struct, frozen=True, tag="d", array_like=True):
    group_id: str
    sample_id: str
    reason: str


class Leased(msgspec.Struct, frozen=True, tag="l", array_like=True):
    batch_id: str
    group_ids: list[str]


class HandedOut(msgspec.Struct, frozen=True, tag="h", array_like=True):
    """What the manifest of a leased batch tells beside its samples. `dropped_told`: drops told of by then."""

    batch_id: str
    step: int
    metrics: dict[str, float]
    dropped_told: dict[str, int]


class GivenBack(msgspec.Struct, frozen=True, tag="g", array_like=True):
    batch_id: str


class Trained(msgspec.Struct, frozen=True, tag="t", array_like=True):
    batch_id: str


class Held(msgspec.Struct, frozen=True, tag="w", array_like=True):
    """Engines that may be written to until a `Released`."""

    engine_ids: list[str]


class Released(msgspec.Struct, frozen=True, tag="r", array_like=True):
    """The lease has ended (empty: it ran out). `keys`: engine id → admin key of those that serve `version`, proven."""

    lease_id: str
    version: int
    keys: dict[str, str]


class Distrusted(msgspec.Struct, frozen=True, tag="q", array_like=True):
    """What the engine holds is not known any more."""

    engine_id: str


Change = Held | Released | Distrusted


class Weights(msgspec.Struct, frozen=True, array_like=True):
    """Of the engines: the newest release, and those `held` since, which may have been written to."""

    lease_id: str = ""
    version: int = -1
    keys: dict[str, str] = {}
    held: list[str] = []

    def after(self, change: Change) -> "Weights":
        match change:
            case Held(engine_ids=engine_ids):
                return msgspec.structs.replace(self, held=list(dict.fromkeys([*self.held, *engine_ids])))
            case Released(lease_id=lease_id, version=version, keys=keys):
                return Weights(lease_id, version, keys)
            case Distrusted(engine_id=engine_id):
                keys = {name: key for name, key in self.keys.items() if name != engine_id}
                return msgspec.structs.replace(self, keys=keys)


class BookedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A live group without its payload; `journaled` of its samples have one in some segment."""

    group_id: str
    version: int
    sample_ids: list[str]
    journaled: list[str]


class Books(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """All metadata. `steps`: batches trained; `cursor`: prompts drawn."""

    steps: int
    cursor: int
    trained: int
    dropped: dict[str, int]
    dropped_told: dict[str, int]
    groups: list[BookedGroup] = []
    leases: list[Leased] = []
    handed_out: list[HandedOut] = []
    weights: Weights = Weights()

    def payloads(self) -> set[str]:
        """Live samples that have one, or some of it, in this segment or an earlier one."""
        return {sample_id for group in self.groups for sample_id in group.journaled}


Record = Books | Admitted | Joined | Begun | Finished | Dropped | Leased | HandedOut | GivenBack | Trained | Change


def unheard(_: Record) -> None:
    """The journal of a store that keeps none."""


def frame(record: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(record)
    header = _HEADER.pack(len(body), zlib.crc32(body))
    return header + _OF_HEADER.pack(zlib.crc32(header)) + body


def read_frames(data: bytes, name: str, kind: Any = Record) -> Iterator[Any]:
    """The records of a segment, but for one that was not written to its end.

    Args:
        name: of the segment, in errors.
        kind: of the records, as msgspec takes it.

    Raises:
        JournalDamaged: a whole frame is not as it was written.
    """
    decoder = msgspec.msgpack.Decoder(kind)
    view, at = memoryview(data), 0
    while (start := at + _HEADER.size + _OF_HEADER.size) <= len(view):
        length, checksum = _HEADER.unpack_from(view, at)
        body = view[start : start + length]
        try:
            if zlib.crc32(view[at : at + _HEADER.size]) != _OF_HEADER.unpack_from(view, at + _HEADER.size)[0]:
                raise msgspec.ValidationError("its header's checksum is another")
            if len(body) < length:
                return
            if zlib.crc32(body) != checksum:
                raise msgspec.ValidationError("its checksum is another")
            yield decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise JournalDamaged(
                f"{name}: the frame at byte {at} is not as it was written ({error}); what the rollout role held "
                "cannot be taken over, start the run again: it goes on from its newest checkpoint"
            ) from None
        at = start + length


@dataclass(frozen=True)
class Recovered:
    """`state.steps` batches are trained; `leases` are not, and their groups stand in the state as all others."""

    state: RolloutState
    leases: list[Leased]
    handed_out: list[HandedOut]
    weights: Weights = field(default_factory=Weights)


@dataclass
class _Group:
    group_id: str
    version: int
    sample_ids: list[str]


@dataclass
class Replay:
    """Does the records again, one after the other."""

    _books: Books | None = None
    _steps: int = 0
    _cursor: int = 0
    _trained: int = 0
    _dropped: Counter[str] = field(default_factory=Counter)
    _told: dict[str, int] = field(default_factory=dict)
    _groups: dict[str, _Group] = field(default_factory=dict)
    _payloads: dict[str, SavedSample] = field(default_factory=dict)
    """Over all segments, the newest of each sample."""
    _expected: set[str] = field(default_factory=set)
    """Live samples whose payload must be in some segment."""
    _leases: dict[str, Leased] = field(default_factory=dict)
    _handed_out: dict[str, HandedOut] = field(default_factory=dict)
    _weights: Weights = field(default_factory=Weights)

    def apply(self, records: Iterable[Record]) -> None:
        """Raises JournalDamaged: they do not begin with Books, or speak of a group or a batch that is not there."""
        for record in records:
            if self._books is None and not isinstance(record, Books):
                raise JournalDamaged(f"the journal does not begin with its books, but with {type(record).__name__}")
            try:
                self._apply(record)
            except (KeyError, ValueError) as error:
                raise JournalDamaged(f"{type(record).__name__} of what is not there: {error!r}") from None

    def result(self) -> Recovered | None:
        """None: nothing was written. Raises JournalDamaged: the payload of a live sample is in no segment."""
        if self._books is None:
            return None
        if lost := sorted(self._expected - self._payloads.keys()):
            raise JournalDamaged(f"the payloads of {len(lost)} samples are in no segment: {', '.join(lost[:4])}")
        groups = [self._saved(group) for group in self._groups.values()]
        state = RolloutState(self._steps, self._cursor, self._trained, dict(self._dropped), dict(self._told), groups)
        return Recovered(state, list(self._leases.values()), list(self._handed_out.values()), self._weights)

    def _saved(self, group: _Group) -> SavedGroup:
        there = [self._payloads[sample_id] for sample_id in group.sample_ids if sample_id in self._payloads]
        finished = [sample for sample in there if sample.reward is not None]
        begun = [sample for sample in there if sample.reward is None]
        return SavedGroup(group.group_id, group.version, group.sample_ids, finished, begun)

    def _apply(self, record: Record) -> None:
        match record:
            case Books():
                self._open(record)
            case Admitted(group_id=group_id, version=version, sample_ids=sample_ids, drawn=drawn):
                self._groups[group_id] = _Group(group_id, version, list(sample_ids))
                self._cursor += drawn
            case Joined(group_id=group_id, sample_id=sample_id):
                self._groups[group_id].sample_ids.append(sample_id)
            case Begun(group_id=group_id, sample=sample) | Finished(group_id=group_id, sample=sample):
                sample_id = self._member(group_id, sample.payload.sample_id)
                self._payloads[sample_id] = sample
            case Dropped(group_id=group_id, sample_id=sample_id, reason=reason):
                self._drop(group_id, sample_id, reason)
            case Leased(batch_id=batch_id):
                self._leases[batch_id] = record
            case HandedOut(batch_id=batch_id):
                self._handed_out[batch_id] = record
                self._told = dict(record.dropped_told)
            case GivenBack(batch_id=batch_id):
                del self._leases[batch_id]
                self._handed_out.pop(batch_id, None)
            case Trained(batch_id=batch_id):
                self._train(batch_id)
            case Held() | Released() | Distrusted():
                self._weights = self._weights.after(record)

    def _open(self, books: Books) -> None:
        """Metadata anew; payloads stay, for those of live samples may stand in earlier segments."""
        self._books = books
        self._steps, self._cursor, self._trained = books.steps, books.cursor, books.trained
        self._dropped, self._told = Counter(books.dropped), dict(books.dropped_told)
        self._groups = {one.group_id: _Group(one.group_id, one.version, list(one.sample_ids)) for one in books.groups}
        self._leases = {lease.batch_id: lease for lease in books.leases}
        self._handed_out = {one.batch_id: one for one in books.handed_out}
        self._weights = books.weights
        self._expected = {sample_id for group in books.groups for sample_id in group.journaled}
        live = {sample_id for group in books.groups for sample_id in group.sample_ids}
        self._payloads = {sample_id: sample for sample_id, sample in self._payloads.items() if sample_id in live}

    def _member(self, group_id: str, sample_id: str) -> str:
        if sample_id not in self._groups[group_id].sample_ids:
            raise KeyError(sample_id)
        return sample_id

    def _drop(self, group_id: str, sample_id: str, reason: str) -> None:
        group = self._groups[group_id]
        group.sample_ids.remove(sample_id)
        self._dropped[reason] += 1
        self._forget(sample_id)
        if not group.sample_ids:
            del self._groups[group_id]

    def _train(self, batch_id: str) -> None:
        for group_id in self._leases.pop(batch_id).group_ids:
            for sample_id in self._groups.pop(group_id).sample_ids:
                self._trained += 1
                self._forget(sample_id)
        self._handed_out.pop(batch_id, None)
        self._steps += 1

    def _forget(self, sample_id: str) -> None:
        self._payloads.pop(sample_id, None)
        self._expected.discard(sample_id)
