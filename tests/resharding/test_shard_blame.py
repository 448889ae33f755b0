"""Reports of a transfer that stood still, and whom they blame. A chain: trainer 0, then engines 1, 2 and 3."""

from typing import Any

import numpy as np
import pytest

from slimerl.engine.inside.links import LinkBroken, broken_report
from slimerl.resharding.shard_blame import Hop, blamed
from slimerl.resharding.shard_orders import Transfers
from slimerl.resilience.deadline import DeadlineExceeded

HOPS: list[Hop] = [(0, 1, 4), (1, 2, 4), (2, 3, 4), (0, 3, 9), (3, 1, 9), (1, 2, 9)]
"""In their total order."""
NAMES = ["trainer/0", "engine-1/0", "engine-2/0", "engine-3/0"]
MEMBERS = {name: number for number, name in enumerate(NAMES)}
ENGINE_OF = {name: name.removesuffix("/0") for name in NAMES[1:]}
TRANSFERS = Transfers(*np.array([[*hop, 8] for hop in HOPS]).T)

Seen = LinkBroken | DeadlineExceeded | None


def still(*hop: int) -> LinkBroken:
    return LinkBroken("nothing came", True, hop)  # type: ignore[arg-type]  # three


def closed(*hop: int) -> LinkBroken:
    return LinkBroken("closed", False, hop)  # type: ignore[arg-type]  # three


def whom(*seen: Seen) -> list[str]:
    """What each member saw, in their order; None: it came to the end."""
    reports: dict[str, Any] = {
        name: {"ok": True} if one is None else broken_report(one) for name, one in zip(NAMES, seen, strict=True)
    }
    return list(blamed(TRANSFERS, MEMBERS, ENGINE_OF, reports))


@pytest.mark.parametrize(
    ("seen", "culprit"),
    [
        ([still(0, 1, 4), still(0, 1, 4), still(1, 2, 4), still(2, 3, 4)], "engine-1"),
        ([None, still(3, 1, 9), still(1, 2, 4), still(2, 3, 4)], "engine-2"),
        ([still(0, 3, 9), still(3, 1, 9), still(1, 2, 9), still(0, 3, 9)], "engine-3"),
        # whoever waits for engine 2 closes first, so that the first hop seems to have been closed
        ([None, still(3, 1, 9), closed(1, 2, 4), still(2, 3, 4)], "engine-2"),
        # engine 1 sends nothing, but takes everything
        ([None, closed(1, 2, 4), still(1, 2, 4), closed(2, 3, 4)], "engine-2"),
        # links that do not open come before all parcels, in the order of their ends
        ([still(0, 3, -1), still(1, 2, -1), still(1, 2, -1), still(2, 3, -1)], "engine-3"),
        ([None, still(1, 2, -1), still(1, 2, -1), still(2, 3, -1)], "engine-2"),
        # slow itself
        ([None, DeadlineExceeded("slow"), still(1, 2, 4), still(2, 3, 4)], "engine-1"),
        ([None, DeadlineExceeded("slow"), None, None], "engine-1"),
    ],
)
def test_w12_the_first_hop_that_nothing_crossed_names_the_engine(seen: list[Seen], culprit: str) -> None:
    """Fault: an engine's links carry nothing, and every member reports that its own links broke."""
    assert whom(*seen) == [culprit]


@pytest.mark.parametrize(
    "seen",
    [
        [closed(0, 1, 4), closed(0, 1, 4), closed(1, 2, 4), closed(2, 3, 4)],
        [DeadlineExceeded("slow"), still(0, 1, 4), still(1, 2, 4), still(2, 3, 4)],
        [None, None, None, None],
    ],
    ids=["a connection was reset", "the trainer was slow", "nothing broke"],
)
def test_no_engine_is_blamed_for_a_reset_connection_or_a_slow_trainer(seen: list[Seen]) -> None:
    assert whom(*seen) == []
