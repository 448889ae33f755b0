"""An admission ledger and its shards without a network: what goes from one to the other arrives."""

from collections.abc import Callable
from typing import Any

from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.ledger import AdmissionLedger
from slimerl.rollout.ledger_books import LedgerBooks, ShardBooks
from slimerl.rollout.shard_link import ShardLink
from slimerl.samples.ledger_messages import Settled
from slimerl.samples.messages import SampleMeta, decode, encode

GROUPS, SIZE, STEPS, LEASE_S = 2, 2, 1000, 10.0
PLENTY = 1000


def gate(staleness: int, steps: int = STEPS) -> StalenessGate:
    return StalenessGate(GROUPS, staleness, steps)


def empty_ledger(shards: int, staleness: int = 0, **options: Any) -> AdmissionLedger:
    books = LedgerBooks(gate(staleness), SIZE, [ShardBooks() for _ in range(shards)])
    return AdmissionLedger(books, LEASE_S, 0.0, **options)


def meta(position: int, name: str, version: int) -> SampleMeta:
    return SampleMeta(f"{position}/{name}", f"{position}", 1, 2, 2, version, version, 1.0, True, "stop")


def outcome(position: int, version: int, kind: int) -> Settled:
    """0: all samples are left; 1: one is dropped; 2: all are; 3: one was forked besides."""
    names = ["0", "1", "1~a"][: {0: 2, 1: 1, 2: 0, 3: 3}[kind]]
    dropped = {0: {}, 1: {"timeout": 1}, 2: {"timeout": 1, "refused": 1}, 3: {}}[kind]
    return Settled(position, [meta(position, name, version) for name in names], dropped)


def talk(ledger: AdmissionLedger, link: ShardLink, room: int = PLENTY, now_s: float = 0.0) -> None:
    """Until neither has anything new to say; nothing is lost on the way."""
    if not link.joined:
        link.take(ledger.join(link.join(), now_s))
    for _ in range(2):
        link.take(ledger.report(link.report(room - open_groups(link)), now_s))


def open_groups(link: ShardLink) -> int:
    return sum(held.settled is None for held in link.held.values())


def joined(ledger: AdmissionLedger, shards: int) -> list[ShardLink]:
    links = [ShardLink(number, 1) for number in range(shards)]
    for link in links:
        talk(ledger, link)
    return links


def finish(link: ShardLink, kind: Callable[[int], int] = lambda position: 0) -> None:
    """All that is under way."""
    for position, held in sorted(link.held.items()):
        if held.settled is None:
            link.settled(outcome(position, held.version, kind(position)))


def over_the_wire(message: Any, kind: Any) -> Any:
    return decode(encode(message), kind)
