"""A prompt that several requests bring to an engine at once is computed there once.

Flows in: requests as they get and give back their slots. Flows out: when each may be sent.
An engine finds in its cache what an earlier batch computed, not what stands beside in the same one: of eight siblings
that arrive together each would have the prompt computed. So one of them has it computed alone, by a request for no
token, and the others wait for that. What they then find cached is told in their answers: of the prompt, or little of it
where an engine has several caches (`engine.data_parallel_attention`) or none.
Invariants: nobody waits for longer than that one request takes, whatever becomes of it or of who sent it; requests that
have little to save, as far as that is known of their engine and its present weights, are sent at once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from slimerl.engine.protocol import Generation
from slimerl.rollout.router import Query, Reservation
from slimerl.samples.written_ids import Tokens

MIN_SAVED_TOKENS = 128
"""One more request costs an engine about as much as the prompts of some hundred tokens."""

LATEST = 0.25
"""Weight of one more answer in what an engine is believed to have of a prompt: a group of eight convinces."""

_Key = tuple[str, int, str, int]


@dataclass(slots=True)
class _Company:
    """Requests of one prompt that hold slots of one engine."""

    key: _Key
    tokens: Tokens
    requests: int = 0
    computed: "asyncio.Future[bool] | None" = None
    """Done when the prompt was computed (True), or the request for it has failed."""
    behind: set[int] = field(default_factory=set)
    """Numbers of the slots whose requests are sent behind a prompt that was computed."""


class SharedPrompts:
    def __init__(self) -> None:
        self._companies: dict[_Key, _Company] = {}
        self._joined: dict[int, _Company] = {}
        """By the number of the slot."""
        self._cached: dict[str, tuple[int, float]] = {}
        """By engine: the version, and the part of a prompt that is found cached once it was computed."""

    def join(self, slot: Reservation, version: int, query: Query) -> None:
        """A request has a slot of an engine that serves `version`."""
        if not query.group or query.tokens is None:
            return
        key = slot.engine_id, version, query.group, len(query.tokens)
        company = self._companies.setdefault(key, _Company(key, query.tokens))
        if company.tokens is query.tokens or company.tokens == query.tokens:
            company.requests += 1
            self._joined[slot.number] = company

    def leave(self, slot: Reservation, answer: Generation | None = None) -> None:
        """It gives the slot back, with what it was answered if it was."""
        company = self._joined.pop(slot.number, None)
        if company is None:
            return
        # what is scored is computed, whatever is cached: a request for no token says nothing
        cached = answer.meta.get("cached_tokens") if answer is not None and answer.tokens else None
        if slot.number in company.behind and isinstance(cached, int):
            self._learn(company, min(1.0, cached / len(company.tokens)))
        company.requests -= 1
        if not company.requests:
            del self._companies[company.key]

    async def computed(self, slot: Reservation, compute: Callable[[], Awaitable[object]]) -> None:
        """Return when the request may be sent.

        Args:
            compute: asks the engine for the prompt alone; called by the first of them, and what it raises goes there.
        """
        company = self._joined.get(slot.number)
        if company is None:
            return
        if company.computed is None:
            await asyncio.sleep(0)  # siblings that begin in the same moment join, too
        if company.computed is not None:
            if await asyncio.shield(company.computed):
                company.behind.add(slot.number)
            return
        # that many prompts need not be computed, for one more that is
        saved = company.requests * self._part_cached(company) - 1
        if saved * len(company.tokens) < MIN_SAVED_TOKENS:
            return
        company.computed = asyncio.get_running_loop().create_future()
        succeeded = False
        try:
            await compute()
            succeeded = True
            company.behind.add(slot.number)
        finally:
            company.computed.set_result(succeeded)

    def _learn(self, company: _Company, part: float) -> None:
        """An answer tells how much of the prompt was cached. One of older weights than were heard of is late."""
        engine_id, version, *_ = company.key
        if engine_id not in self._cached or self._cached[engine_id][0] <= version:
            before = self._part_cached(company)
            self._cached[engine_id] = version, before + LATEST * (part - before)

    def _part_cached(self, company: _Company) -> float:
        """Of a prompt that was computed before, what its engine has of it: all, until it is known better."""
        engine_id, version, *_ = company.key
        known_of, part = self._cached.get(engine_id, (version, 1.0))
        return part if known_of == version else 1.0
