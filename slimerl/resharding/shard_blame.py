"""Whose fault it is that a transfer stood still: read off members' reports, each of which names the hop it waited at.

Flows in: reports of members whose links broke. Flows out: the engine to go on without, and why. Pure.
Invariant: nobody is blamed where no wait ran out (a connection was reset: a second try may mend that), nor for a
trainer rank that was slow itself.

All members begin their steps in one total order, so the first step of all that has not ended is what the others wait
for: the first of the hops that are reported. Some of these say that the link was closed, by a victim whose time was
over a moment earlier.
"""

from collections.abc import Mapping
from typing import Any

from slimerl.resharding.shard_orders import Transfers

Hop = tuple[int, int, int]
"""Sender, receiver, parcel (-1 while links are opened)."""


def blamed(
    transfers: Transfers,
    members: Mapping[str, int],
    engine_of: Mapping[str, str],
    reports: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """By id, the engine at which the transfer stood still, and why; empty where there is none.

    Args:
        members: their numbers, by name. `engine_of`: the engine of those that are an engine's rank.
        reports: `broken_report` of `engine/inside/links.py`, and others.
    """
    broken = {member: report for member, report in reports.items() if "broken" in report}
    late = {member for member, report in broken.items() if report["late"]}
    stood_still = bool(late) or any(report["stood_still"] for report in broken.values())
    if not stood_still or late - engine_of.keys():
        return {}
    hops: dict[str, Hop] = {member: tuple(report["hop"]) for member, report in broken.items() if report["hop"]}
    if not hops:
        return {engine_of[member]: f"{engine_of[member]} ({member}): {broken[member]['broken']}" for member in late}
    first = min(hops.values(), key=lambda hop: _due(transfers, hop))
    of_number = {number: member for member, number in members.items()}
    # The receiver first: of two that are as suspect, the sender is known to have had the parcel.
    ends = [of_number[number] for number in (first[1], first[0]) if of_number[number] in engine_of]
    if not ends:
        return {}

    def suspicion(member: str) -> tuple[bool, int]:
        """Slow itself; then, by how many others it was waited for."""
        number = members[member]
        return member in late, sum(number in hop[:2] for other, hop in hops.items() if other != member)

    culprit = max(ends, key=suspicion)
    witness = next(member for member, hop in hops.items() if hop == first)
    at = f"{first[0]} → {first[1]}" + (f", parcel {first[2]}" if first[2] >= 0 else "")
    what = f"the transfer stood still at {at} ({witness}: {broken[witness]['broken']})"
    return {engine_of[culprit]: f"{engine_of[culprit]} ({culprit}): {what}"}


def _due(transfers: Transfers, hop: Hop) -> tuple[int, int, int]:
    """Links are opened before the first parcel, in the order of their ends."""
    sender, receiver, parcel = hop
    if parcel < 0:
        return 0, sender, receiver
    found = (transfers.sender == sender) & (transfers.receiver == receiver) & (transfers.parcel == parcel)
    return 1, int(found.argmax()), 0
