"""A prompt that several requests bring to an engine at once is computed there once.

Flows in: requests as they get and give back their slots. Flows out: when each may be sent.
An engine finds in its cache what an earlier batch computed, not what stands beside in the same one: of eight siblings
that arrive together each would have the prompt computed. So one of them has it computed alone, by a request for no
token, and the others wait for that.
Invariants: nobody waits for longer than that one request takes, whatever becomes of it or of who sent it; requests that
have little to save are sent at once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slimerl.rollout.router import Query, Reservation

MIN_SAVED_TOKENS = 128
"""One more request costs an engine about as much as the prompts of some hundred tokens."""

_Key = tuple[str, int, str, int]


@dataclass(slots=True)
class _Company:
    """Requests of one prompt that hold slots of one engine."""

    key: _Key
    tokens: tuple[int, ...]
    requests: int = 0
    computed: "asyncio.Future[None] | None" = None
    """Done when the prompt is in the cache, or the request for it has failed."""


class SharedPrompts:
    def __init__(self) -> None:
        self._companies: dict[_Key, _Company] = {}
        self._joined: dict[int, _Company] = {}
        """By the number of the slot."""

    def join(self, slot: Reservation, version: int, query: Query) -> None:
        """A request has a slot of an engine that serves `version`."""
        if not query.group or query.tokens is None:
            return
        key = slot.engine_id, version, query.group, len(query.tokens)
        company = self._companies.setdefault(key, _Company(key, query.tokens))
        if company.tokens is query.tokens or company.tokens == query.tokens:
            company.requests += 1
            self._joined[slot.number] = company

    def leave(self, slot: Reservation) -> None:
        """It gives the slot back."""
        company = self._joined.pop(slot.number, None)
        if company is not None:
            company.requests -= 1
            if not company.requests:
                del self._companies[company.key]

    async def computed(self, slot: Reservation, compute: Callable[[], Awaitable[object]]) -> bool:
        """Return when the request may be sent.

        Args:
            compute: asks the engine for the prompt alone; called by the first of them, and what it raises goes there.

        Returns:
            Was there anything to wait for?
        """
        company = self._joined.get(slot.number)
        if company is None:
            return False
        if company.computed is None:
            await asyncio.sleep(0)  # siblings that begin in the same moment join, too
        if company.computed is not None:
            waits = not company.computed.done()
            await asyncio.shield(company.computed)
            return waits
        if (company.requests - 1) * len(company.tokens) < MIN_SAVED_TOKENS:
            return False
        company.computed = asyncio.get_running_loop().create_future()
        try:
            await compute()
        finally:
            company.computed.set_result(None)
        return True
