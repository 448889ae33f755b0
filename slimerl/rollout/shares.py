"""Which rollout process has what, where a run has several. Pure.

Flows in: positions of groups, names of sessions. Flows out: the number of a shard, from 0 on; names for its sessions.
Invariant: it depends on nothing but these and how many shards there are, so that every process says the same.
"""

import re
from collections.abc import Iterator

import xxhash

_GIVEN = re.compile(r"([0-9]{1,4})-[0-9a-f]{16}")


def shard_of_group(position: int, shards: int) -> int:
    """Of neighbouring positions each shard has equally many, whatever part of them a step takes."""
    return position % shards


def shards_from(position: int, shards: int) -> Iterator[int]:
    """The shards in the order in which they are to make a group: the second where the first cannot, and so on."""
    first = shard_of_group(position, shards)
    return ((first + turn) % shards for turn in range(shards))


def name_of_session(shard: int, number: int) -> str:
    """For a session that a shard begins. `number`: chosen at random, 64 bits."""
    return f"{shard}-{number:016x}"


def is_given(session_id: str) -> bool:
    """Is it a name of `name_of_session`?"""
    return _GIVEN.fullmatch(session_id) is not None


def shard_of_session(session_id: str, shards: int) -> int:
    """Of a session that a shard has named that shard; of one that an agent program has named, by the name alone."""
    given = _GIVEN.fullmatch(session_id)
    if given is not None and int(given[1]) < shards:
        return int(given[1])
    return xxhash.xxh64_intdigest(session_id.encode()) % shards
