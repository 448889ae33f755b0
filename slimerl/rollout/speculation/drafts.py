"""Where drafts come from: what siblings have answered so far, and what the epoch before answered to the same prompt.

Flows in: the tokens of every generation, with their log-probabilities and version. Flows out: `Draft`s for what comes
behind a context. Pure but for being remembered; `answers()` and `restore()` carry it over a restart.

Two ways to look: `behind` finds the longest end of the context in any answer to the prompt (a suffix index), `again`
takes the sample's own old answer while the new one has been the same so far.

Invariants: a draft never comes from the sample it is for. Answers of other groups count only below a given version,
that is, from finished steps: at staleness 0 they are the same in a run that is repeated, siblings are not (which of
them is ahead depends on the clock). At most `max_tokens` are kept; prompts that were answered longest ago go first,
and of each prompt only the two newest groups stay.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from slimerl.rollout.speculation.rules import Array

MATCH = 4
"""Tokens that a context and an answer must share before an answer's next token is a draft; shorter ends are found by
chance."""
LONGEST_MATCH = 32
"""Ends are compared up to here; longer ones say nothing more."""
CANDIDATES = 8
"""Places with the same end that are looked at in one answer, the newest first."""
GROUPS = 2
"""Of a prompt: the present one and the one of the epoch before."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Draft:
    """`logprobs`: of the tokens when they were drawn, by the policy of that time. `ends`: the answer stopped there."""

    tokens: tuple[int, ...]
    logprobs: Array
    ends: bool


@dataclass(slots=True)
class Answer:
    """`tokens`: the last ones of the prompt, `context` of them, then all that came behind. `logprobs`: of each, 0 for
    those of the context and for tokens that no policy drew."""

    group: str
    session: str
    start: int
    """Place of the first token behind the context in the whole sequence."""
    context: int
    tokens: Array
    logprobs: Array
    version: int
    """Newest."""
    stopped: bool
    _hashes: Array | None = None
    _places: Array | None = None

    @property
    def end(self) -> int:
        """Length of the whole sequence so far."""
        return self.start + len(self.tokens) - self.context

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], version: int, stopped: bool) -> None:
        self.tokens = np.concatenate([self.tokens, np.asarray(tokens, dtype=np.int32)])
        self.logprobs = np.concatenate([self.logprobs, np.asarray(logprobs, dtype=np.float32)])
        self.version, self.stopped = version, stopped
        self._hashes = self._places = None

    def find(self, end: Array) -> tuple[int, int]:
        """(tokens in common, place behind them) of the longest match of `end` with something to follow; (0, 0): none.

        Args:
            end: the last `LONGEST_MATCH` tokens of a context, at least `MATCH`.
        """
        if self._hashes is None or self._places is None:
            found = _hashes(self.tokens)
            order = np.argsort(found, kind="stable")
            self._hashes, self._places = found[order], order.astype(np.int32)
        wanted = _hashes(end[-MATCH:])[0]
        low = int(np.searchsorted(self._hashes, wanted, side="left"))
        high = int(np.searchsorted(self._hashes, wanted, side="right"))
        best = (0, 0)
        for place in self._places[max(low, high - CANDIDATES) : high][::-1]:
            behind = int(place) + MATCH
            if self.context <= behind < len(self.tokens):
                best = max(best, (_common(self.tokens[:behind], end), behind), key=lambda match: match[0])
        return best if best[0] >= MATCH else (0, 0)


def _hashes(tokens: Array) -> Array:
    """Of every `MATCH` consecutive tokens: [tokens - MATCH + 1]."""
    count = max(0, len(tokens) - MATCH + 1)
    wide = tokens.astype(np.uint64)
    value = np.zeros(count, dtype=np.uint64)
    for shift in range(MATCH):
        value = (value ^ wide[shift : shift + count]) * _MULTIPLIER
        value ^= value >> np.uint64(29)
    return value


def _common(tokens: Array, end: Array) -> int:
    """Tokens that both have at their ends."""
    length = min(len(tokens), len(end))
    differ = np.flatnonzero(tokens[len(tokens) - length :] != end[len(end) - length :])
    return length - 1 - int(differ[-1]) if len(differ) else length


@dataclass
class Drafts:
    """`siblings`: look at the samples of the same group, too."""

    max_tokens: int
    siblings: bool = True
    tokens: int = 0
    """Kept now."""
    evicted: int = 0
    """Prompts forgotten so far."""
    _prompts: "OrderedDict[str, dict[str, Answer]]" = field(default_factory=OrderedDict)
    """Prompt → session → answer, in the order in which they began."""

    def add(
        self,
        group: str,
        session: str,
        context: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        stopped: bool,
    ) -> None:
        """A sample got `tokens` behind `context`; in parts, in order, where it goes on."""
        prompt = prompt_of(group)
        answers = self._prompts.setdefault(prompt, {})
        self._prompts.move_to_end(prompt)
        answer = answers.get(session)
        if answer is None or answer.end > len(context):  # it began anew, after a restart
            self._forget(answers, session)
            known = min(len(context), MATCH)
            end = np.asarray(context[len(context) - known :], dtype=np.int32)
            answer = Answer(
                group, session, len(context), known, end, np.zeros(known, np.float32), version, stopped=False
            )
            answers[session] = answer
            self.tokens += known
        observed = context[answer.end :]
        self.tokens += len(observed) + len(tokens)
        answer.extend([*observed, *tokens], [*([0.0] * len(observed)), *logprobs], version, stopped)
        self._trim(prompt)

    def behind(self, group: str, session: str, context: Sequence[int], limit: int, version: int) -> Draft | None:
        """Up to `limit` tokens that an answer has behind the longest end of `context`; None: there is none.

        Args:
            version: answers of other groups must be of an older one.
        """
        if len(context) < MATCH or limit < 1:
            return None
        end = np.asarray(context[-LONGEST_MATCH:], dtype=np.int32)
        found = [(*answer.find(end), answer) for answer in self._sources(group, session, version)]
        longest = max((common for common, _, _ in found), default=0)
        if not longest:
            return None
        answer, place = _most_usual([(answer, place) for common, place, answer in found if common == longest], limit)
        return _draft(answer, place, limit)

    def again(self, group: str, session: str, context: Sequence[int], limit: int, version: int) -> Draft | None:
        """Up to `limit` tokens with which the old answer of the same sample of the group goes on, where it has been
        `context` so far; None: it was another, there is none, or it is not of an older version than `version`."""
        number = session.removeprefix(f"{group}/")
        for answer in self._sources(group, session, version):
            if answer.group == group or answer.session.removeprefix(f"{answer.group}/") != number:
                continue
            place = answer.context + len(context) - answer.start
            have = np.asarray(context[max(0, len(context) - place) :] if place > 0 else [], dtype=np.int32)
            if answer.context <= place < len(answer.tokens) and np.array_equal(answer.tokens[:place], have):
                return _draft(answer, place, limit)
        return None

    def answers(self) -> list[Answer]:
        """All, in the order of their prompts; later additions change none of their arrays."""
        return [_copy(answer) for answers in self._prompts.values() for answer in answers.values()]

    def restore(self, answers: Sequence[Answer]) -> None:
        """Have these and no others."""
        self._prompts.clear()
        self.tokens = 0
        for answer in answers:
            prompt = prompt_of(answer.group)
            self._prompts.setdefault(prompt, {})[answer.session] = answer
            self._prompts.move_to_end(prompt)
            self.tokens += len(answer.tokens)
        self._evict()

    def _sources(self, group: str, session: str, version: int) -> Iterator[Answer]:
        for answer in self._prompts.get(prompt_of(group), {}).values():
            if answer.session == session:
                continue
            if self.siblings if answer.group == group else answer.version < version:
                yield answer

    def _trim(self, prompt: str) -> None:
        answers = self._prompts[prompt]
        old = sorted({answer.group for answer in answers.values()}, key=_epoch)[:-GROUPS]
        for session in [session for session, answer in answers.items() if answer.group in old]:
            self._forget(answers, session)
        self._evict()

    def _evict(self) -> None:
        while self.tokens > self.max_tokens and self._prompts:
            _, answers = self._prompts.popitem(last=False)
            self.tokens -= sum(len(answer.tokens) for answer in answers.values())
            self.evicted += 1

    def _forget(self, answers: dict[str, Answer], session: str) -> None:
        answer = answers.pop(session, None)
        if answer is not None:
            self.tokens -= len(answer.tokens)


def _most_usual(places: list[tuple[Answer, int]], limit: int) -> tuple[Answer, int]:
    """The one that goes on as most of the others do, token after token; of equals the newest: the policy has moved."""
    places = sorted(places, key=lambda place: -place[0].version)
    for ahead in range(limit):
        following = [int(answer.tokens[at + ahead]) for answer, at in places if at + ahead < len(answer.tokens)]
        if len(following) < 2:
            break
        (usual, _), *_ = Counter(following).most_common(1)
        places = [
            (answer, at)
            for answer, at in places
            if at + ahead < len(answer.tokens) and answer.tokens[at + ahead] == usual
        ]
    return places[0]


def _draft(answer: Answer, place: int, limit: int) -> Draft:
    stop = min(len(answer.tokens), place + limit)
    return Draft(
        tokens=tuple(answer.tokens[place:stop].tolist()),
        logprobs=answer.logprobs[place:stop],
        ends=answer.stopped and stop == len(answer.tokens),
    )


def _copy(answer: Answer) -> Answer:
    return Answer(
        *(answer.group, answer.session, answer.start, answer.context),
        *(answer.tokens, answer.logprobs, answer.version, answer.stopped),
    )


def prompt_of(group: str) -> str:
    """Groups are named EPOCH/PROMPT (`prompts.py`)."""
    return group.partition("/")[2]


def names_a_prompt(group: str) -> bool:
    epoch, _, prompt = group.partition("/")
    return epoch.isdecimal() and bool(prompt)


def _epoch(group: str) -> int:
    return int(group.partition("/")[0])
