"""What is to be generated: conversations, their prompts and the lengths of their answers. Pure.

Flows in: a seed and a shape. Flows out: a `Trace`, the hit rate of an oracle on it, and real ids for the router.
A text is a path of segments (system prompt, prompt, answer, observation, ...); a segment's key stands for its tokens,
so that two texts share exactly the segments, by key, that they begin with.

Invariant: a trace depends on its arguments alone; tokens depend on the segment's key alone.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

Path = tuple["Segment", ...]


@dataclass(frozen=True, slots=True)
class Segment:
    key: str
    length: int


@dataclass(frozen=True, slots=True)
class Turn:
    """The engine answers with `answer` tokens; `observation` (a tool's or the user's words) precedes the answer."""

    observation: Segment | None
    answer: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """One session. Its first turn answers the opening."""

    session: str
    group: str
    opening: Path
    turns: tuple[Turn, ...]
    before: tuple[int, ...] = ()
    """Answer tokens of its prompt's conversations an epoch before: the history that foretells this one."""

    @property
    def answer_tokens(self) -> int:
        return sum(turn.answer for turn in self.turns)

    def answer_key(self, turn: int) -> str:
        return f"{self.session}/a{turn}"


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    siblings: int
    conversations: tuple[Conversation, ...]
    """In the order in which they are handed out."""

    @property
    def requests(self) -> int:
        return sum(len(one.turns) for one in self.conversations)

    @property
    def answer_tokens(self) -> int:
        return sum(one.answer_tokens for one in self.conversations)

    def oracle(self) -> "Oracle":
        return oracle(self.conversations)


@dataclass(frozen=True, slots=True)
class Oracle:
    prompt_tokens: int
    missing_tokens: int

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.missing_tokens / self.prompt_tokens


def oracle(conversations: Iterable[Conversation]) -> Oracle:
    """What one engine with an endless cache that serves everything would have to prefill: the least possible."""
    seen: dict[str, int] = {}
    prompt = missing = 0
    for one in conversations:
        length = 0
        for number, turn in enumerate(one.turns):
            new = one.opening if number == 0 else tuple(s for s in (turn.observation,) if s is not None)
            for segment in new:
                before = seen.get(segment.key, 0)
                missing += max(0, segment.length - before)
                seen[segment.key] = max(segment.length, before)
                length += segment.length
            prompt += length
            length += turn.answer
    return Oracle(prompt, missing)


def segment_tokens(key: str, start: int, stop: int) -> tuple[int, ...]:
    """Token ids of a segment, from `start` to `stop`: one id of the key's own, which tells as much apart as text does
    and is made a hundred times faster."""
    return (crc32(key.encode()) & 0x7FFF_FFFF,) * (stop - start)


@dataclass(frozen=True)
class Lengths:
    """A log-normal length, in tokens: `mean` is that of the tokens after clipping at `most` only approximately.

    `group_share`: share of the variance (of the logarithm) that all siblings of a group have in common: a hard prompt
    has long answers.
    """

    mean: float
    spread: float = 0.0
    """Standard deviation of the logarithm: 0 gives equal lengths, 1 a heavy tail (99th percentile = 6 x mean)."""
    most: int = 1 << 20
    group_share: float = 0.5

    def draw(self, rng: random.Random, of_group: float) -> int:
        """One length; `of_group`: the group's own standard normal number."""
        if not self.spread:
            return min(self.most, max(1, round(self.mean)))
        own = rng.gauss(0.0, 1.0)
        z = self.group_share**0.5 * of_group + (1.0 - self.group_share) ** 0.5 * own
        # exp(N(m, s)) has the mean exp(m + s^2/2).
        length = self.mean * math.exp(self.spread * z - self.spread**2 / 2)
        return min(self.most, max(1, round(length)))


@dataclass(frozen=True)
class Shape:
    """How a trace is drawn. Lengths in tokens."""

    name: str = "design"
    groups: int = 48
    siblings: int = 8
    turns: int = 4
    system: int = 0
    """A system prompt that all groups share."""
    prompt: Lengths = field(default_factory=lambda: Lengths(1024, 0.3))
    answer: Lengths = field(default_factory=lambda: Lengths(256))
    observation: Lengths = field(default_factory=lambda: Lengths(396))
    interleaved: bool = False
    """Siblings are handed out apart from one another (first of all groups, second of all groups, ...)."""
    skewed_groups: int = 0
    """So many groups have four times the siblings."""


def draw_trace(shape: Shape, seed: int) -> Trace:
    """The trace of a shape and a seed."""
    rng = random.Random(f"{shape.name}/{seed}")
    groups: list[list[Conversation]] = []
    for number in range(shape.groups):
        siblings = shape.siblings * (4 if number < shape.skewed_groups else 1)
        groups.append(_draw_group(shape, f"{shape.name}-{seed}-{number}", siblings, rng))
    rng.shuffle(groups)
    ordered = _interleaved(groups) if shape.interleaved else [one for group in groups for one in group]
    return Trace(shape.name, shape.siblings, tuple(ordered))


def _draw_group(shape: Shape, name: str, siblings: int, rng: random.Random) -> list[Conversation]:
    of_group = rng.gauss(0.0, 1.0)
    opening: Path = (Segment(f"{name}/prompt", shape.prompt.draw(rng, of_group)),)
    if shape.system:
        opening = (Segment(f"{shape.name}/system", shape.system), *opening)
    turns = [_draw_turns(shape, f"{name}.{sibling}", of_group, rng) for sibling in range(siblings)]
    earlier = [_draw_turns(shape, "", of_group, rng) for _ in range(shape.siblings)]
    before = tuple(sum(turn.answer for turn in one) for one in earlier)
    return [Conversation(f"{name}.{n}", name, opening, one, before) for n, one in enumerate(turns)]


def _draw_turns(shape: Shape, session: str, of_group: float, rng: random.Random) -> tuple[Turn, ...]:
    turns = []
    for number in range(shape.turns):
        length = shape.observation.draw(rng, of_group) if number else 0
        observation = Segment(f"{session}/o{number}", length) if number else None
        turns.append(Turn(observation, shape.answer.draw(rng, of_group)))
    return tuple(turns)


def _interleaved(groups: Sequence[list[Conversation]]) -> list[Conversation]:
    longest = max(len(group) for group in groups)
    return [group[sibling] for sibling in range(longest) for group in groups if sibling < len(group)]
