"""The staleness rule: gate and choice of batches together bound the age of what is trained."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from slimerl.rollout.admission import GateError, StalenessGate, choose_batch
from slimerl.samples.store import GroupView


def gate(staleness: int, version: int = 0, groups: int = 4, steps: int = 1000) -> StalenessGate:
    return StalenessGate(groups, staleness, steps, version)


def admit_all(one: StalenessGate) -> int:
    count = 0
    while one.may_admit():
        one.admit()
        count += 1
    return count


def test_a1_with_staleness_0_one_batch_starts_per_version():
    one = gate(0)
    assert admit_all(one) == 4
    for _ in range(4):
        one.accept()
    assert not one.may_admit()
    with pytest.raises(GateError, match="4 accepted \\+ 0 running reach the limit of 4 at version 0"):
        one.admit()
    one.advance(1)
    assert admit_all(one) == 4


def test_a1_nothing_starts_before_the_first_version():
    assert admit_all(gate(3, version=-1)) == 0


def test_a1_staleness_lets_so_many_batches_start_ahead():
    assert admit_all(gate(2)) == 12


def test_a_dropped_group_is_replaced():
    one = gate(0)
    admit_all(one)
    one.drop()
    assert admit_all(one) == 1


def test_nothing_starts_that_no_step_would_train():
    one = gate(3, steps=2)
    assert admit_all(one) == 8
    one.advance(1)
    assert admit_all(one) == 0


def test_resuming_counts_the_groups_of_the_finished_steps_as_accepted():
    one = gate(1, version=-1)
    one.resume(5)
    assert (one.accepted, admit_all(one)) == (20, 8)


def test_versions_never_go_back():
    one = gate(0, version=3)
    with pytest.raises(GateError, match="version 2 is older than 3"):
        one.advance(2)


def test_a_slow_group_may_be_overtaken_while_there_is_time_and_not_after():
    groups = [GroupView("slow", 0, False), GroupView("b", 0, True), GroupView("c", 1, True)]
    assert choose_batch(groups, step=0, groups_per_step=1, max_staleness=2) == ["b"]
    left = [groups[0], groups[2]]
    assert choose_batch(left, step=1, groups_per_step=1, max_staleness=2) == ["c"]
    assert choose_batch([groups[0], GroupView("d", 2, True)], step=2, groups_per_step=1, max_staleness=2) is None


@settings(max_examples=300, deadline=None)
@given(
    staleness=st.integers(0, 3),
    groups_per_step=st.integers(1, 3),
    oversample=st.one_of(st.none(), st.floats(1, 4)),
    choices=st.lists(st.integers(0, 5), min_size=10, max_size=200),
)
def test_a1_no_group_is_trained_too_stale_and_the_run_never_stalls(staleness, groups_per_step, oversample, choices):
    """Groups finish and are lost in any order; batches are taken as early as the rule allows."""
    one = StalenessGate(groups_per_step, staleness, steps=10_000, version=0, oversample=oversample)
    groups: list[GroupView] = []
    steps = made = 0
    for choice in choices:
        while one.may_admit():
            one.admit()
            groups.append(GroupView(f"g{made}", one.version, False))
            made += 1
        assert len(groups) <= math.ceil((oversample or staleness + 1) * groups_per_step)
        successor = StalenessGate(groups_per_step, staleness, steps=10_000)
        successor.resume(steps)
        successor.check_ages([group.version for group in groups])
        unready = [place for place, group in enumerate(groups) if not group.ready]
        if unready and choice < 4:
            place = unready[(choice * 7) % len(unready)]
            groups[place] = GroupView(groups[place].group_id, groups[place].version, True)
            one.accept()
        elif unready and choice == 4:
            del groups[unready[0]]
            one.drop()
        chosen = choose_batch(groups, steps, groups_per_step, staleness)
        if chosen is None:
            # Only unfinished groups may keep a batch from being complete.
            assert any(not group.ready for group in groups) or one.may_admit()
            continue
        taken = [group for group in groups if group.group_id in chosen]
        assert len(taken) == groups_per_step
        assert all(one.version - group.version <= staleness for group in taken)
        groups = [group for group in groups if group.group_id not in chosen]
        steps += 1
        one.advance(steps)


@settings(max_examples=300, deadline=None)
@given(
    staleness=st.integers(0, 3),
    groups_per_step=st.integers(1, 3),
    versions=st.lists(st.integers(0, 4), max_size=12).map(sorted),
)
def test_a1_groups_of_an_earlier_process_are_refused_just_where_no_batch_could_ever_be_chosen(
    staleness, groups_per_step, versions
):
    """Injected: `max_staleness` may be less than it was; all groups are ready, and a run goes on after step 4."""
    one = StalenessGate(groups_per_step, staleness, steps=100)
    one.resume(4)
    refused = False
    try:
        one.check_ages(versions)
    except GateError:
        refused = True
    groups = [GroupView(f"g{number}", version, True) for number, version in enumerate(versions)]
    waits = False
    for step in range(4, 4 + len(versions)):
        while len(groups) < (staleness + 1) * groups_per_step:
            groups.append(GroupView(f"new {step} {len(groups)}", step, True))
        chosen = choose_batch(groups, step, groups_per_step, staleness)
        if chosen is None:
            waits = True
            break
        groups = [group for group in groups if group.group_id not in chosen]
    oldest_is_too_old = any(version + staleness < 4 for version in versions)
    assert refused == (waits or oldest_is_too_old)


def test_a1_groups_that_are_young_enough_but_too_many_are_refused_with_what_to_set():
    """Injected: `max_staleness` was 4 and is 2; the fourth of six groups, two a step, would be trained at version 3."""
    one = StalenessGate(2, 2, steps=100)
    one.resume(2)
    with pytest.raises(GateError, match=r"begun at version 0 would be trained at version 3: .* set it to 3 or more"):
        one.check_ages([0, 0, 0, 0, 1, 1])
    replace(one, max_staleness=3).check_ages([0, 0, 0, 0, 1, 1])
