"""The prefix cache of a simulated engine: a radix tree over segments, with locks and LRU eviction. Pure.

Flows in: paths of segments as requests start and end. Flows out: how many tokens of a path are cached.
Invariant: `tokens` is the sum of the lengths of all nodes; a node under lock, or above one, is never evicted.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import Optional

from slimerl.simulation.rollout_trace import Path


@dataclass(slots=True, eq=False)
class Node:
    """A cached segment behind its parent's path."""

    key: str
    length: int
    parent: Optional["Node"]
    children: dict[str, "Node"] = field(default_factory=dict)
    locks: int = 0
    used: int = 0


class RadixCache:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.root = Node("", 0, None)
        self.tokens = 0
        self._clock = count(1)
        self._leaves: list[tuple[int, int, Node]] = []
        """(used, tie, node): candidates of eviction, some outdated."""

    def cached(self, path: Path) -> int:
        """Leading tokens of `path` that are cached."""
        node, found = self.root, 0
        for segment in path:
            child = node.children.get(segment.key)
            if child is None:
                break
            found += min(child.length, segment.length)
            if child.length < segment.length:
                break
            node = child
        return found

    def lock(self, path: Path) -> Node:
        """Cache the whole path, and keep it until `unlock` of the node returned."""
        node = self.root
        for segment in path:
            node = self._grow(node, segment.key, segment.length)
        held: Node | None = node
        while held is not None:
            held.locks += 1
            held = held.parent
        return node

    def unlock(self, node: Node, answer_key: str = "", answer: int = 0) -> None:
        """A request has ended; the tokens that it generated are cached behind its prompt."""
        if answer and node.key == answer_key and node.parent is not None:
            self._grow(node.parent, answer_key, answer)
        elif answer:
            self._offer(self._grow(node, answer_key, answer))
        held: Node | None = node
        while held is not None:
            held.locks -= 1
            self._offer(held)
            held = held.parent

    def evict(self, tokens: int) -> int:
        """Give up the least recently used ends of paths until `tokens` are free; returns how many are."""
        freed = 0
        while freed < tokens and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.used != used or node.locks or node.children or node.parent is None:
                continue
            del node.parent.children[node.key]
            freed += node.length
            self.tokens -= node.length
            self._offer(node.parent)
            node.parent = None
        return freed

    def clear(self) -> None:
        """Flush. No node may be locked."""
        if self.root.locks:
            raise RuntimeError(f"the cache is flushed while {self.root.locks} requests hold KV in it")
        self.root = Node("", 0, None)
        self.tokens = 0
        self._leaves.clear()

    def _grow(self, parent: Node, key: str, length: int) -> Node:
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(key, 0, parent)
        if length > node.length:
            self.tokens += length - node.length
            node.length = length
        node.used = next(self._clock)
        return node

    def _offer(self, node: Node) -> None:
        if not node.locks and not node.children and node.parent is not None:
            heapq.heappush(self._leaves, (node.used, next(self._clock), node))
