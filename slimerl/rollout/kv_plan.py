"""What is known of a request when its engine is chosen: the blocks of its prompt, and who has how much of them. Pure.

Flows in: a query, what is remembered of its session and group, the prefix index. Flows out: a `Plan`.
Invariants: KV of other weights is never counted as cached; what is cached is never more than the prompt.
"""

import msgspec

from slimerl.rollout.kv_memory import Memory, Session
from slimerl.rollout.prefix_index import BLOCK_TOKENS, PrefixIndex, hash_blocks
from slimerl.rollout.router import Query

_OPENING = "opening "
"""Before the key of its last block: the name of a group that nobody has named."""


class Plan(msgspec.Struct, frozen=True):
    """Made when a query is routed, used again for its reservation."""

    query: Query
    prompt: int
    """Tokens."""
    keys: list[int]
    """Of its blocks."""
    cached: dict[int, int]
    """Prompt tokens that are cached, by slot."""
    group: str
    """The query's; of one that names none, sessions that open with the same prompt are siblings."""


def plan_of(
    query: Query, session: Session | None, memory: Memory, index: PrefixIndex, version: int, at: int | None = None
) -> Plan:
    """
    Args:
        version: of the weights that engines serve.
        at: the slot that has been chosen: `cached` is asked of no other.
    """
    if query.tokens is None:
        return Plan(query, 0, [], {}, query.group)
    prompt = len(query.tokens)
    group = memory.group(query.group) if session is None and query.group else None
    known = session.keys if session is not None else group.keys if group is not None else ()
    keys = hash_blocks(query.tokens, known)
    found = index.match(version, keys) if at is None else {at: index.depth(at, version, keys)}
    cached = {slot: blocks * BLOCK_TOKENS for slot, blocks in found.items()}
    if session is not None and session.seat is not None and session.version == version:
        # The engine has the answer's tokens too, unless the index says that the prompt went meanwhile.
        slot, before = session.seat.slot, len(session.keys)
        whole = before <= found.get(slot, 0) and keys[:before][-1:] == session.keys[-1:]
        if whole and not session.seat.gone and session.held <= prompt:
            cached[slot] = max(cached.get(slot, 0), session.held)
    name = session.group if session is not None else query.group
    if session is None and not name and query.session and keys:
        name = f"{_OPENING}{keys[-1]}"
    return Plan(query, prompt, keys, cached, name)
