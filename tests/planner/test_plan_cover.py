"""The proof that stands in every plan: each way of spoiling a plan is found by `check_cover`, and named."""

from dataclasses import replace

import numpy as np
import pytest
from planner_models import DENSE, FINE, MOE

from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families import family_of
from slimerl.resharding.families.table import Table
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology, make, make_plan, resume, without
from slimerl.resharding.planner.cover import check_cover, check_routes
from slimerl.resharding.planner.rings import schedule
from slimerl.resharding.planner.templates import signatures


@pytest.fixture(scope="module")
def plan():
    train = MegatronLayout(2, 2, pipeline=1, expert=2, expert_tensor=1)
    return make_plan(SyncShape(MOE, train, EngineLayout(4, 2), Topology(4, 4, 3, 2), options=FINE))


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def spoil_records(plan, **columns):
    return replace(plan, template=replace(plan.template, records=replace(plan.template.records, **columns)))


def spoil_atoms(plan, **columns):
    return replace(plan, template=replace(plan.template, atoms=replace(plan.template.atoms, **columns)))


def test_the_plan_itself_passes(plan):
    check_cover(plan)


def test_a_plan_that_is_made_wrongly_is_never_handed_out(plan, monkeypatch):
    def forgetful(parcels, slot, rings, relay_classes):
        turns = schedule(parcels, slot, rings, relay_classes)
        return type(turns)(*(column[1:] for column in vars(turns).values()))

    monkeypatch.setattr(make, "schedule", forgetful)
    with pytest.raises(CoverageError, match="does not reach every node"):
        make_plan(plan.shape)
    with pytest.raises(CoverageError, match="does not reach every node"):
        without(plan, [0])


def test_two_records_in_one_place_of_a_parameter_are_found(plan):
    rows = plan.template.records.destination_row
    moved = int(np.flatnonzero(rows > 0)[0])
    with pytest.raises(CoverageError, match="overlap or leave a gap"):
        check_cover(spoil_records(plan, destination_row=changed(rows, moved, 0)))


def test_a_record_that_is_too_short_is_found(plan):
    with pytest.raises(CoverageError, match="overlap or leave a gap"):
        check_cover(spoil_records(plan, columns=changed(plan.template.records.columns, 0, 1)))


def test_a_layer_that_no_atom_has_is_found(plan):
    atoms = plan.template.atoms
    other = atoms.unit.copy()
    other[other == 2] = 1
    with pytest.raises(CoverageError, match="do not have every"):
        check_cover(spoil_atoms(plan, unit=other))


def test_a_rank_that_is_left_out_is_found(plan):
    atoms = plan.template.atoms
    places = atoms.places.copy()
    places[:, 0, 1] = 0
    with pytest.raises(CoverageError, match="engine rank 1 is given 0 bytes"):
        check_cover(spoil_atoms(plan, places=places, demands=places > 0))


def test_rows_that_nobody_sends_are_found(plan):
    fragments = plan.fragments
    long = int(np.argmax(fragments.stop - fragments.first))
    with pytest.raises(CoverageError, match="not all its rows once"):
        check_cover(
            replace(plan, fragments=replace(fragments, stop=changed(fragments.stop, long, fragments.stop[long] - 1)))
        )


def test_a_sender_that_does_not_hold_what_it_is_to_send_is_found(plan):
    atoms, fragments = plan.template.atoms, plan.fragments
    partial = int(np.flatnonzero(~atoms.owners[atoms.owner[fragments.atom]].all(axis=1))[0])
    stranger = int(np.flatnonzero(~atoms.owners[atoms.owner[fragments.atom[partial]]])[0])
    with pytest.raises(CoverageError, match="does not hold it"):
        check_cover(replace(plan, fragments=replace(fragments, root=changed(fragments.root, partial, stranger))))


def test_a_fragment_in_another_senders_parcel_is_found(plan):
    parcels = plan.parcels
    starts = changed(parcels.first_fragment, 1, parcels.first_fragment[1] + 1)
    with pytest.raises(CoverageError):
        check_cover(replace(plan, parcels=replace(parcels, first_fragment=starts)))


def test_a_parcel_that_misses_a_node_is_found(plan):
    operations = plan.operations
    wrong = operations.receiver.copy()
    last = len(wrong) - 1
    wrong[last] = operations.sender[last]
    with pytest.raises(CoverageError, match=r"exactly once|no living engine"):
        check_cover(replace(plan, operations=operations._replace(receiver=wrong)))


def test_passing_on_what_has_not_arrived_is_found(plan):
    operations = plan.operations
    relayed = int(np.flatnonzero(operations.after >= 0)[0])
    early = changed(operations.round, int(operations.after[relayed]), int(operations.round[relayed]))
    with pytest.raises(CoverageError, match="has not got by then"):
        check_cover(replace(plan, operations=operations._replace(round=early)))


@pytest.fixture(scope="module")
def resumed(plan):
    """The plan without an engine, at half time, and what NICs hold then."""
    done = np.arange(len(plan.operations.sender) // 2)
    parcel, nic = plan.operations.parcel[done].astype(np.int64), plan.operations.receiver[done].astype(np.int64)
    return resume(plan, [1], parcel, nic), parcel, nic


def test_what_is_held_is_not_sent_again_and_what_is_not_is_sent(resumed):
    rest, parcel, nic = resumed
    check_routes(rest, parcel, nic)
    alive = rest.nodes.number_of(rest.topology.nics)[nic] >= 0
    with pytest.raises(CoverageError, match="exactly once"):
        check_routes(rest, parcel[alive][1:], nic[alive][1:])
    shorter = type(rest.operations)(*(column[:-1] for column in rest.operations))
    with pytest.raises(CoverageError, match="exactly once"):
        check_routes(replace(rest, operations=shorter), parcel, nic)


def test_a_nic_that_starts_with_a_parcel_that_it_does_not_hold_is_found(resumed):
    rest, parcel, nic = resumed
    at_hand = np.flatnonzero((rest.operations.after < 0) & (rest.operations.sender >= rest.topology.trainer_ranks))
    assert len(at_hand)
    trainer = changed(rest.operations.sender, at_hand[0], 1 - rest.parcels.root[rest.operations.parcel[at_hand[0]]])
    with pytest.raises(CoverageError, match="another rank than its sender"):
        check_routes(replace(rest, operations=rest.operations._replace(sender=trainer)), parcel, nic)


def test_a_weight_that_the_table_places_on_one_side_only_is_named():
    table = family_of(DENSE).table(DENSE)
    layer = table.layers[0]
    lacking = replace(layer, engine=tuple(rule for rule in layer.engine if "o_proj" not in rule.parameter))
    spoiled = Table(table.first, (lacking,) * len(table.layers), table.last)
    shape = SyncShape(DENSE, MegatronLayout(2), EngineLayout(2), Topology(2, 2, 1))
    with pytest.raises(CoverageError, match=r"o_proj.*engine"):
        signatures(spoiled, shape.train, shape.engine, shape.dtype, None)
