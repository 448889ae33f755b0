"""What a shard has noted of a group, on its way to the process that makes up batches.

Flows in: the record of a group, its tokens by version, what has been counted since the group before. Flows out: bytes;
and from those of a batch its figures, as a single process would tell them. Times go by the clock of the day, which
machines share, not by one that each begins for itself.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slimerl.rollout.statistics import GroupRecord, batch_metrics, length_error, staleness_shares
from slimerl.samples.messages import SampleMeta

_TIMES = ("started_s", "generated_s", "ready_s")
_MEANS = frozenset(
    {
        "rollout/engine_idle_share",
        "rollout/engine_load_spread",
        "gateway/open_sessions",
        "gateway/open_requests",
        "gateway/tasks_waiting",
        "gateway/kept_tokens",
    }
)
"""Figures that are not added up: of each its mean over the time in which it was counted."""
ENGINES = "rollout/engines"
"""Of the whole run at one moment: the notes of groups cannot tell it."""


class _Notes(msgspec.Struct, frozen=True):
    record: dict
    tokens: dict[int, int]
    figures: dict[str, float]
    seconds: float
    replaced: list[list[bool | None]] | None = None


def pack_notes(
    record: GroupRecord,
    tokens: Mapping[int, int],
    figures: Mapping[str, float],
    seconds: float,
    replaced: Sequence[Sequence[bool | None]] | None = None,
) -> bytes:
    """
    Args:
        tokens: sampled ones, by version.
        figures: of all groups of the shard, since the notes before.
        seconds: since then.
        replaced: as of `batch_metrics`, since then.
    """
    since = time.time() - time.monotonic()
    fields: dict[str, Any] = {
        name: _plain(getattr(record, name)) for name in (field.name for field in dataclasses.fields(record))
    }
    fields |= {name: fields[name] + since for name in _TIMES if fields[name] is not None}
    groups = None if replaced is None else [list(each) for each in replaced]
    return msgspec.msgpack.encode(_Notes(fields, dict(tokens), dict(figures), seconds, groups))


def batch_figures(
    samples: Sequence[SampleMeta], notes: Mapping[str, bytes], dropped: Mapping[str, int], version: int
) -> dict[str, float]:
    """Figures of one batch, see `statistics.batch_metrics`. Args: `notes`: of each of its groups."""
    read = {name: msgspec.msgpack.decode(each, type=_Notes) for name, each in notes.items() if each}
    records = {name: _record(each.record) for name, each in read.items()}
    tokens = sum((Counter(each.tokens) for each in read.values()), Counter[int]())
    of_shards = [each.replaced for each in read.values() if each.replaced is not None]
    replaced = [group for groups in of_shards for group in groups] if of_shards else None
    metrics = batch_metrics(samples, list(records.values()), dropped, version, replaced)
    metrics |= staleness_shares(tokens, version) | length_error(samples, records)
    return metrics | _told(list(read.values()))


def _told(notes: Sequence[_Notes]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in dict.fromkeys(name for each in notes for name in each.figures if name != ENGINES):
        counted = [(each.figures[name], each.seconds) for each in notes if name in each.figures]
        total = sum(value for value, _ in counted)
        if name in _MEANS:
            seconds = sum(lasted for _, lasted in counted)
            total = sum(value * lasted for value, lasted in counted) / seconds if seconds else total / len(counted)
        figures[name] = total
    return figures


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, set) else value


def _record(fields: dict) -> GroupRecord:
    sets = {name: set(fields[name]) for name in ("unparsable", "reward_failed")}
    return GroupRecord(**{**fields, **sets, "agent": Counter(fields["agent"])})
