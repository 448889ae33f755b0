"""Figures of a batch whose groups several rollout processes have made."""

import pytest
from ledger_scene import meta

from slimerl.rollout.group_notes import ENGINES, batch_figures, pack_notes
from slimerl.rollout.statistics import GroupRecord


def notes(idle_share: float, seconds: float) -> bytes:
    figures = {"rollout/engine_idle_share": idle_share, "reward/correct": 2.0, ENGINES: 1.0}
    return pack_notes(GroupRecord(), {0: 4}, figures, seconds)


def test_counts_are_added_up_and_shares_of_time_count_by_their_time():
    samples = [meta(position, name, 0) for position in range(3) for name in "01"]
    told = {"0": notes(0.5, 3.0), "1": notes(0.1, 1.0), "2": b""}
    figures = batch_figures(samples, told, {}, 0)
    assert figures["rollout/engine_idle_share"] == pytest.approx(0.4)
    assert figures["reward/correct"] == 4.0
    assert ENGINES not in figures, "a moment's number, which the first process knows"
    assert figures["staleness/tokens_behind_0"] == 1.0


def test_shares_of_no_time_count_alike():
    figures = batch_figures([meta(0, "0", 0)], {"0": notes(0.2, 0.0), "1": notes(0.6, 0.0)}, {}, 0)
    assert figures["rollout/engine_idle_share"] == pytest.approx(0.4)


def test_groups_that_were_replaced_are_told_with_those_that_were_kept():
    samples = [meta(position, name, 0) for position in range(2) for name in "01"]
    told = {
        "0": pack_notes(GroupRecord(), {0: 4}, {}, 1.0, [[False, False], [None, False]]),
        "1": pack_notes(GroupRecord(), {0: 4}, {}, 1.0, []),
    }
    figures = batch_figures(samples, told, {}, 0)
    assert figures["rollout/replaced_groups"] == 2
    assert figures["rollout/accuracy_with_replaced"] == pytest.approx(4 / 7)
    assert "rollout/replaced_groups" not in batch_figures(samples, {"0": notes(0.0, 1.0)}, {}, 0)
