"""One admission ledger over several rollout processes: who makes what, what is refused, what a loss does."""

from collections.abc import Callable

import msgspec
import pytest
from ledger_scene import (
    GROUPS,
    LEASE_S,
    PLENTY,
    SIZE,
    empty_ledger,
    finish,
    gate,
    joined,
    meta,
    outcome,
    over_the_wire,
    talk,
)

from slimerl.rollout.admission import choose_batch
from slimerl.rollout.ledger import Fenced, LedgerError, replayed
from slimerl.rollout.ledger_books import LedgerGroup
from slimerl.rollout.shard_link import ShardLink
from slimerl.rollout.shares import shard_of_session
from slimerl.samples.books import GroupView, StoreError
from slimerl.samples.ledger_messages import (
    NO_ENGINE,
    Held,
    LedgerReply,
    LetGo,
    Make,
    Settled,
    ShardJoin,
    ShardReport,
    Void,
)
from slimerl.samples.messages import process_of_engine

# --- which shard makes which group


def test_each_group_is_made_by_the_shard_of_its_position_whoever_reports_first():
    ledger = empty_ledger(3, staleness=2)
    links = [ShardLink(number, 1) for number in (2, 0, 1)]
    ledger.advance(0)
    for link in links:
        talk(ledger, link)
    for link in links:
        talk(ledger, link)
    assert {link.shard: sorted(link.held) for link in links} == {0: [0, 3], 1: [1, 4], 2: [2, 5]}


def test_nothing_is_handed_out_past_a_shard_that_may_yet_come_and_its_groups_go_to_others_once_it_may_not():
    ledger = empty_ledger(2)
    link = ShardLink(0, 1)
    talk(ledger, link)
    ledger.advance(0)
    talk(ledger, link)
    assert sorted(link.held) == [0]
    assert ledger.awaited == [1]
    assert ledger.expire(LEASE_S) == [0, 1]
    link.fenced(1, 1)
    talk(ledger, link, now_s=LEASE_S)
    assert sorted(link.held) == [0, 1]


def test_a_shard_without_room_is_passed_over_unless_the_trainer_waits_and_nobody_has_any():
    ledger = empty_ledger(2, staleness=3)
    first, second = joined(ledger, 2)
    talk(ledger, first, room=0)
    ledger.advance(0)
    talk(ledger, second)
    assert sorted(second.held) == list(range(2 * GROUPS * 2))
    ledger = empty_ledger(2, staleness=3)
    first, second = joined(ledger, 2)
    for link in (first, second):
        talk(ledger, link, room=0)
    ledger.advance(0)
    for link in (first, second):
        talk(ledger, link, room=0)
    assert (sorted(first.held), sorted(second.held)) == ([0], [1])


def single_process(staleness: int, steps: int, kind: Callable[[int], int]) -> list[list[int]]:
    """What one process with the gate alone trains, each group settled in the order of admission."""
    rule, version_of, ready, cursor, batches = gate(staleness), {}, {}, 0, []
    for step in range(1, steps + 1):
        rule.advance(step - 1)
        while True:
            while rule.may_admit():
                rule.admit()
                version_of[cursor], ready[cursor] = rule.version, False
                cursor += 1
            waiting = [position for position, is_ready in ready.items() if not is_ready]
            if not waiting:
                break
            for position in waiting:
                if kind(position) == 2:
                    rule.drop()
                    del ready[position]
                else:
                    rule.accept()
                    ready[position] = True
        views = [GroupView(str(position), version_of[position], True) for position in ready]
        chosen = [int(name) for name in choose_batch(views, step - 1, GROUPS, staleness)]
        batches.append(chosen)
        for position in chosen:
            del ready[position]
    return batches


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_however_many_shards_there_are_the_steps_consume_the_prompts_of_a_single_process(shards, staleness):
    def kind(position: int) -> int:
        return 2 if position % 5 == 3 else position % 2

    ledger = empty_ledger(shards, staleness)
    links = joined(ledger, shards)
    batches = []
    for step in range(1, 9):
        ledger.advance(step - 1)
        for _ in range(3):
            for link in links:
                talk(ledger, link)
                finish(link, kind)
                talk(ledger, link)
        batch = ledger.take_batch(step)
        batches.append(list(batch.positions))
        assert [each.group_id for each in batch.samples] == sorted((each.group_id for each in batch.samples), key=int)
        ledger.trained(step)
    assert batches == single_process(staleness, 8, kind)
    assert ledger.counts().dropped.keys() == {"timeout", "refused"}


def test_a_shard_without_an_engine_gets_nothing_also_where_the_trainer_waits_and_nobody_has_room():
    ledger = empty_ledger(2)
    first, second = joined(ledger, 2)
    for link in (first, second):
        talk(ledger, link, room=NO_ENGINE)
    ledger.advance(0)
    for link in (first, second):
        talk(ledger, link, room=NO_ENGINE)
        assert not link.held
    talk(ledger, second, room=0)
    assert sorted(second.held) == [0, 1]


# --- what is refused


def test_an_older_incarnation_is_not_heard_and_told_which_one_is():
    ledger = empty_ledger(1)
    link, late = ShardLink(0, 1), ShardLink(0, 1)
    talk(ledger, link)
    ledger.expire(LEASE_S)
    with pytest.raises(Fenced, match="shard 0 is not heard as incarnation 1") as caught:
        ledger.report(link.report(PLENTY), LEASE_S)
    link.fenced(caught.value.given, caught.value.incarnation)
    talk(ledger, link, now_s=LEASE_S)
    with pytest.raises(Fenced):
        ledger.join(late.join(), LEASE_S)
    assert link.incarnation == 2


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (ShardReport(5, 1, 0, 1), "there is no shard 5, but 1"),
        (ShardReport(0, 1, 0, 1, 4, []), "tells of events from 4 on, but only 0 are in the books"),
        (ShardReport(0, 1, 9, 1), "knows of 9 orders, and the books of 2"),
        (
            ShardReport(0, 1, 2, 1, 1, [Settled(0, [meta(0, "0", 0)])]),
            r"0 is not settled by \['0/0'\] of \['0'\] and {}",
        ),
        (ShardReport(0, 1, 2, 1, 1, [Settled(0, [meta(0, "0", 0)] * 2)]), "is not settled by"),
        (ShardReport(0, 1, 2, 1, 1, [Settled(0, [meta(0, "0", 0), meta(1, "0", 0)])]), "is not settled by"),
        (ShardReport(0, 1, 2, 1, 1, [Settled(0, [meta(0, "0", 0)], {"a": 2, "b": -1})]), "is not settled by"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_changes_nothing(report, message):
    ledger = empty_ledger(1)
    joined(ledger, 1)
    ledger.advance(0)
    before = ledger.counts()
    with pytest.raises(LedgerError, match=message):
        ledger.report(report, 0.0)
    assert ledger.counts() == before
    assert ledger.books.shards[0].heard == 0


def test_batches_are_taken_and_trained_in_order_and_once():
    ledger = empty_ledger(1)
    [link] = joined(ledger, 1)
    ledger.advance(0)
    talk(ledger, link)
    assert ledger.take_batch(1) is None
    finish(link)
    talk(ledger, link)
    with pytest.raises(LedgerError, match="batch 2 is not the next: 0 of 1000 are taken"):
        ledger.take_batch(2)
    with pytest.raises(LedgerError, match="batch 1 is not out; out: none"):
        ledger.trained(1)
    assert ledger.take_batch(1) == ledger.take_batch(1)
    ledger.trained(1)
    ledger.trained(1)
    with pytest.raises(StoreError, match="batch 1 was trained already"):
        ledger.take_batch(1)
    assert ledger.counts().trained == GROUPS * SIZE


def test_what_is_told_again_is_passed_over_however_late_it_comes():
    ledger = empty_ledger(1, staleness=1)
    [link] = joined(ledger, 1)
    join = link.join()
    ledger.advance(0)
    talk(ledger, link)
    link.settled(outcome(0, 0, 0))
    early = link.report(PLENTY)
    link.take(ledger.report(early, 0.0))
    link.settled(outcome(1, 0, 0))
    talk(ledger, link)
    before = ledger.counts()
    assert ledger.report(early, 0.0).heard == 2
    assert ledger.join(join, 0.0).incarnation == 1, "and the shard needs no new one"
    assert ledger.counts() == before
    link.settled(outcome(2, 0, 0))
    talk(ledger, link)
    assert ledger.counts().buffered == 3 * SIZE
    ledger.advance(1)
    reply = ledger.report(link.report(PLENTY), 0.0)
    assert [order.position for order in link.take(reply)] == [4, 5]
    assert link.take(reply) == [], "each order is carried out once"
    link.fenced(0, 5)
    assert link.incarnation == 1, "that was said of an earlier one"
    talk(ledger, link)


def test_what_a_returning_shard_has_of_a_batch_is_taken_only_if_it_is_what_the_manifest_says():
    """Fault: its journal has another attempt at the group than the one that it had reported."""
    ledger = empty_ledger(1)
    [link] = joined(ledger, 1)
    ledger.advance(0)
    talk(ledger, link)
    finish(link)
    talk(ledger, link)
    assert ledger.take_batch(1) is not None
    other = [Held(0, 0, outcome(0, 0, 1)), link.held[1]]
    again = ShardLink(0, 2)
    again.hold(other)
    assert Void(0) in ledger.join(again.join(), 1.0).orders
    assert ledger.take_batch(1) is None


# --- what the books do where a shard is lost


def test_a2_a_batch_whose_shard_was_lost_before_it_was_trained_is_made_up_anew():
    """Fault: the process that holds the payload of a batch ends for good."""
    ledger = empty_ledger(2)
    first, second = joined(ledger, 2)
    ledger.advance(0)
    for link in (first, second):
        talk(ledger, link)
        finish(link)
        talk(ledger, link)
    assert ledger.take_batch(1).shards == {"0": 0, "1": 1}
    talk(ledger, first, now_s=1.0)
    assert ledger.expire(LEASE_S) == [1]
    assert ledger.take_batch(1) is None, "half of it is nowhere"
    talk(ledger, first, now_s=2.0)
    finish(first)
    talk(ledger, first, now_s=2.0)
    assert ledger.take_batch(1).shards == {"0": 0, "1": 0}


def test_a_shard_that_comes_back_with_what_it_had_keeps_it_if_nobody_has_begun_it_meanwhile():
    ledger = empty_ledger(1)
    [link] = joined(ledger, 1)
    ledger.advance(0)
    talk(ledger, link)
    link.settled(outcome(0, 0, 1))
    talk(ledger, link)
    before = ledger.counts()
    ledger.expire(LEASE_S)
    assert ledger.counts().running == GROUPS * SIZE, "it counts as never made"
    again = ShardLink(0, 2)
    again.hold(link.held.values())
    talk(ledger, again, now_s=LEASE_S)
    assert ledger.counts() == before
    assert again.held == link.held


def test_a1_what_a_returning_shard_has_of_older_weights_than_the_group_was_given_out_for_anew_is_not_taken():
    """Fault: it would be trained later than max_staleness allows."""
    ledger = empty_ledger(2, staleness=1)
    first, second = joined(ledger, 2)
    ledger.advance(0)
    talk(ledger, first)
    talk(ledger, second)
    assert 1 in second.held
    ledger.report(first.report(PLENTY), 5.0)
    ledger.advance(1)
    ledger.expire(LEASE_S)
    talk(ledger, first, now_s=5.0)
    assert first.held[1].version == 1
    ledger.expire(5.0 + LEASE_S)
    second.settled(outcome(1, 0, 0))
    second.fenced(1, 1)
    reply = ledger.join(second.join(), 20.0)
    assert Void(1) in reply.orders


# --- shares and messages


def test_sessions_spread_over_shards_by_their_names_alone():
    homes = [shard_of_session(f"session-{number}", 4) for number in range(4000)]
    assert homes == [shard_of_session(f"session-{number}", 4) for number in range(4000)]
    assert all(900 < homes.count(shard) < 1100 for shard in range(4))
    assert [process_of_engine(index, 2) for index in range(5)] == [0, 1, 0, 1, 0]


def test_orders_and_replies_survive_the_wire():
    reply = LedgerReply(1, 2, 3.0, 1, [Make(1, 2), LetGo(3, [1]), Void(4)])
    assert over_the_wire(reply, LedgerReply) == reply
    join = ShardJoin(0, 1, [Held(0, 1, outcome(0, 1, 3)), Held(1, 1)])
    assert over_the_wire(join, ShardJoin) == join


def test_a_batch_tells_of_each_dropped_sample_once_also_where_the_ledger_has_started_again():
    log: list = []
    ledger = empty_ledger(1, note=log.append)
    (link,) = joined(ledger, 1)
    for step, (kind, dropped) in enumerate([(1, {"timeout": GROUPS}), (0, {}), (1, {"timeout": GROUPS})], 1):
        ledger.advance(step - 1)
        talk(ledger, link)
        finish(link, lambda position, kind=kind: kind)
        talk(ledger, link)
        assert ledger.take_batch(step) is not None
        for books in (ledger.books, replayed(log, gate(0), SIZE, 1)):
            assert books.told - books.told_before == dropped
        ledger.give_back(step)
        assert ledger.books.told == ledger.books.told_before
        assert ledger.take_batch(step) is not None
        assert ledger.books.told - ledger.books.told_before == dropped
        ledger.trained(step)


def test_c1_a_shard_that_gets_groups_of_a_checkpoint_joins_again_to_say_so():
    ledger = empty_ledger(2)
    first, second = joined(ledger, 2)
    late = ledger.report(second.report(PLENTY), 0.0)
    books = ledger.books.snapshot()
    groups = [LedgerGroup(0, 1, 0), LedgerGroup(1, 1, 1)]
    begun = msgspec.structs.replace(books, version=1, cursor=2, batches_taken=1, accepted=GROUPS, groups=groups)
    whole = msgspec.structs.replace(begun, admitted=4 + 2 * SIZE, trained=4)
    ledger.restore(whole)
    second.hold([Held(1, 1, outcome(1, 1, 0))])
    assert second.take(late) == [], "it was said of before"
    talk(ledger, second)
    assert ledger.books.groups[1].settled == outcome(1, 1, 0)
    ledger.restore(whole)
    assert ledger.books.groups[1].settled is not None, "told again it is the same"
    first.fenced(first.incarnation, first.incarnation)
    talk(ledger, first)
    assert ledger.books.groups[0].shard in (None, 0), "it never got what it was to go on with"
    talk(ledger, first)
    assert sorted(first.held) == [0], "and makes the group again"
