"""Which requests to move when some engines run dry while others are crowded: the tail of a rollout. Pure.

Flows in: what every serving engine has in flight. Flows out: advice, cheapest moves first: requests that wait in an
engine's queue (they lose nothing), then running ones, which keep their tokens and are prefilled elsewhere (a divided
rollout). Whoever follows the advice aborts the request, ends its reservation and reserves the engine named. Between two
chunks of a sample there is nothing to abort: the router asks `evens_out` when the next one comes.

Invariant: a move never makes the engine that it goes to as crowded as the one that it leaves, and is worth its prefill.
"""

from collections.abc import Iterable, Sequence

import msgspec

from slimerl.rollout.kv_fleet import EngineModel, Seat

TAIL_LOAD = 0.75
"""Share of its decode slots below which an engine has room to spare."""
TAIL_SKEW = 4
"""Requests that the most loaded engine has more than the least loaded one; below that moving evens out nothing."""


class InFlight(msgspec.Struct, frozen=True):
    """One request of an engine. `tokens`: of its prompt, all of which is prefilled again elsewhere; `expected`: new
    tokens that it was expected to generate when it was sent; `kv`: tokens by which it fills its engine's cache."""

    number: int
    tokens: int
    expected: int
    kv: int = 0


class Move(msgspec.Struct, frozen=True):
    """`number`: of the reservation. `queued`: it waits for a slot still, and has generated nothing."""

    number: int
    source: str
    target: str
    queued: bool


def may_be_tail(seats: Iterable[Seat]) -> bool:
    """Is there an engine with room to spare, and one with so many requests more? Cheap, to be asked often."""
    least = most = 0
    dry = False
    for number, seat in enumerate(seats):
        least = seat.load if number == 0 else min(least, seat.load)
        most = max(most, seat.load)
        dry = dry or seat.load < TAIL_LOAD * seat.model.slots
    return dry and most - least >= TAIL_SKEW


def tail_moves(fleet: Sequence[tuple[Seat, Sequence[InFlight]]], running_too: bool = True) -> list[Move]:
    """Moves that even the load out, as long as an engine below `TAIL_LOAD` and a skew of `TAIL_SKEW` is left.

    Args:
        fleet: serving engines with their requests, oldest first: the youngest beyond its slots wait in its queue.
        running_too: also move requests that are decoding.
    """
    loads = {seat: len(requests) for seat, requests in fleet}
    left = {seat: list(requests) for seat, requests in fleet}
    moves: list[Move] = []
    while loads:
        source = max(loads, key=lambda seat: loads[seat])
        target = min(loads, key=lambda seat: loads[seat] / seat.model.slots)
        skew = loads[source] - loads[target]
        if skew < TAIL_SKEW or loads[target] >= TAIL_LOAD * target.model.slots or not left[source]:
            return moves
        queued = loads[source] > source.model.slots or _overfull(source.model, left[source])
        if not queued and not running_too:
            return moves
        request = left[source].pop()
        if not queued and not _worth(request, skew, source.model, target.model):
            continue
        moves.append(Move(request.number, source.engine_id, target.engine_id, queued))
        loads[source] -= 1
        loads[target] += 1
    return moves


def evens_out(source: Seat, target: Seat, expected: int, missing: int) -> bool:
    """Is a request that goes on better sent to `target` than to `source`, which has the KV of its prompt?

    Args:
        expected: tokens that it will generate.
        missing: tokens of its prompt that the target would have to prefill.
    """
    # its own slot on the source was given back
    skew = source.load + 1 - target.load
    if skew < TAIL_SKEW or target.load >= TAIL_LOAD * target.model.slots:
        return False
    return _gained_s(expected, missing, skew, source.model) > missing / target.model.prefill_tokens_per_s


def _overfull(model: EngineModel, requests: Sequence[InFlight]) -> bool:
    """Does the youngest wait for KV, whatever the slots? Of what they will have generated, half is there on average."""
    return sum(request.kv - request.expected // 2 for request in requests) > model.kv_tokens


def _worth(request: InFlight, skew: int, source: EngineModel, target: EngineModel) -> bool:
    """Half of what it was expected to generate is left, on average."""
    gained = _gained_s(request.expected / 2, request.tokens, skew, source)
    return gained > request.tokens / target.prefill_tokens_per_s


def _gained_s(left: float, tokens: int, skew: int, source: EngineModel) -> float:
    """Each token that is left comes sooner where `skew` requests fewer decode."""
    return left * skew * (source.step_per_request_s + source.step_per_kv_token_s * tokens)
