"""Which rollout process has what, where a run has several. Pure.

Flows in: positions of groups, names of sessions. Flows out: the number of a shard, from 0 on.
Invariant: it depends on nothing but these and how many shards there are, so that every process says the same.
"""

from collections.abc import Iterator

import xxhash


def shard_of_group(position: int, shards: int) -> int:
    """Of neighbouring positions each shard has equally many, whatever part of them a step takes."""
    return position % shards


def shards_from(position: int, shards: int) -> Iterator[int]:
    """The shards in the order in which they are to make a group: the second where the first cannot, and so on."""
    first = shard_of_group(position, shards)
    return ((first + turn) % shards for turn in range(shards))


def shard_of_session(session_id: str, shards: int) -> int:
    """Of a session of an agent program, which may have chosen the name."""
    return xxhash.xxh64_intdigest(session_id.encode()) % shards
