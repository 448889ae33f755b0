"""The proof that a plan writes every destination byte exactly once, from the finished arrays alone.

Flows in: a plan. Flows out: nothing, or a `CoverageError`. The steps, each over all ranks at once:

1. The destinations of the records, with the vocabulary's padding, tile every engine parameter.
2. The atoms of a record are all its layers and experts, once; what their demand sets give to a rank is what it holds.
3. The fragments of an atom are all its rows, once, each sent by a rank that owns it.
4. Each parcel reaches every node of its route exactly once, from its sender or from a node that has it by then, and
   serves every GPU that wants one of its fragments. A plan that goes on (`resume`) starts with what is held already.
"""

from typing import TYPE_CHECKING

import numpy as np

from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.planner.ranks import RankTable, some
from slimerl.resharding.planner.records import Records
from slimerl.resharding.planner.templates import IntArray, Signatures
from slimerl.resharding.planner.topology import Topology

if TYPE_CHECKING:
    from slimerl.resharding.planner.plan import Plan, PlanTemplate

NONE_HELD: IntArray = np.empty(0, dtype=np.int64)
"""No NIC holds a parcel yet."""


def check_cover(plan: "Plan") -> None:
    """Raises CoverageError naming what is written twice, left out, or sent by whom does not have it."""
    check_template(plan.template, plan.topology)
    _check_fragments(plan)
    _check_parcels(plan)
    check_routes(plan)


def check_template(template: "PlanTemplate", topology: Topology) -> None:
    """Steps 1 and 2, which no node or replica enters."""
    _check_tiling(template.model, template.records, template.engine)
    _check_atoms(template)
    _check_ranks(template, topology)


def _check_tiling(model: Signatures, records: Records, engine: RankTable) -> None:
    """Rectangles tile a parameter exactly when their signed corners add up to its own.

    (The mixed difference of the sum of their indicators is that sum of corners, and it determines the sum.)
    """
    of = np.repeat(np.arange(len(records)), np.diff(records.first_destination))
    boxes = [
        (records.destination, records.destination_part, records.destination_row, records.destination_column,
         records.rows[of], records.columns[of], np.ones(len(of), dtype=np.int64))
    ]  # fmt: skip
    for number, parameter in enumerate(model.engine_parameters):
        part, row, rows = parameter.padding.T
        full = np.full(len(part), parameter.extent.columns)
        ones = np.ones(len(part), dtype=np.int64)
        boxes.append((ones * number, part, row, ones * 0, rows, full, ones))
        parts = np.arange(int(engine.parts[parameter.axis].max()) + 1)
        ones = np.ones(len(parts), dtype=np.int64)
        height, width = parameter.extent
        boxes.append((ones * number, parts, ones * 0, ones * 0, ones * height, ones * width, -ones))
    parameter_of, part, row, column, rows, columns, sign = (
        np.concatenate(column) for column in zip(*boxes, strict=True)
    )
    corners = [(row, column, sign), (row, column + columns, -sign), (row + rows, column, -sign),
               (row + rows, column + columns, sign)]  # fmt: skip
    key_row, key_column, weight = (np.concatenate(values) for values in zip(*corners, strict=True))
    owner = np.tile(parameter_of * (int(part.max()) + 1) + part, 4)
    order = np.lexsort((key_column, key_row, owner))
    owner, key_row, key_column, weight = owner[order], key_row[order], key_column[order], weight[order]
    new = np.r_[True, (np.diff(owner) != 0) | (np.diff(key_row) != 0) | (np.diff(key_column) != 0)]
    starts = np.flatnonzero(new)
    wrong = np.flatnonzero(np.add.reduceat(weight, starts))
    if len(wrong):
        at = starts[wrong[0]]
        number, bad_part = divmod(int(owner[at]), int(part.max()) + 1)
        raise CoverageError(
            f"{model.engine_parameters[number].name}, part {bad_part}: destinations overlap or leave a gap at "
            f"row {key_row[at]}, column {key_column[at]}"
        )


def _check_atoms(template: "PlanTemplate") -> None:
    """Every record has each of its units and experts in exactly one atom."""
    atoms, records, model = template.atoms, template.records, template.model
    order = np.lexsort((atoms.expert, atoms.unit, atoms.record))
    record, unit = atoms.record[order], atoms.unit[order]
    first, stop = atoms.expert[order], (atoms.expert + atoms.experts)[order]
    new = np.r_[True, (record[1:] != record[:-1]) | (unit[1:] != unit[:-1])]
    last = np.r_[new[1:], True]
    experts = np.array([max(t.experts, 1) for t in model.templates])[records.template[record]]
    fits = (first == np.where(new, 0, np.r_[0, stop[:-1]])) & (~last | (stop == experts))
    if not fits.all():
        name = model.templates[records.template[record[np.flatnonzero(~fits)[0]]]].name
        raise CoverageError(f"{name}: its atoms do not have every expert once")
    units = np.bincount(record[new], minlength=len(records))
    wrong = np.flatnonzero(units != np.array([len(t.units) for t in model.templates])[records.template])
    if len(wrong):
        raise CoverageError(
            f"{model.templates[records.template[wrong[0]]].name}: its atoms do not have every layer once"
        )


def _check_ranks(template: "PlanTemplate", topology: Topology) -> None:
    """Each engine rank is given as many bytes as its parameters have."""
    atoms, engine = template.atoms, template.engine
    nbytes = np.bincount(atoms.demand, weights=atoms.nbytes, minlength=len(atoms.places))
    expected = _held_bytes(template.model, template.records, engine)
    for rank in range(engine.ranks):
        node, slot = topology.class_and_slot(rank)
        given = int((nbytes * atoms.places[:, node, slot]).sum())
        if given != expected[rank]:
            raise CoverageError(f"engine rank {rank} is given {given} bytes, its parameters have {expected[rank]}")


def _held_bytes(model: Signatures, records: Records, engine: RankTable) -> IntArray:
    """[ranks]: bytes of the parameters of each engine rank, without padding."""
    template_of = np.full(len(model.engine_parameters), -1)
    of = np.repeat(np.arange(len(records)), np.diff(records.first_destination))
    template_of[records.destination] = records.template[of]
    held = np.zeros(engine.ranks, dtype=np.int64)
    for parameter, template in zip(model.engine_parameters, template_of.tolist(), strict=True):
        part = engine.parts[parameter.axis]
        padded = np.bincount(parameter.padding[:, 0], weights=parameter.padding[:, 2], minlength=int(part.max()) + 1)
        rows = parameter.extent.rows - padded.astype(np.int64)[part]
        units = engine.holds[list(model.templates[template].units)].sum(axis=0)[engine.stage_of]
        slices = engine.places[parameter.experts, parameter.location].shape[2] if parameter.experts else 1
        held += rows * parameter.extent.columns * parameter.itemsize * units * slices
    return held


def _check_fragments(plan: "Plan") -> None:
    atoms, fragments = plan.template.atoms, plan.fragments
    order = np.lexsort((fragments.first, fragments.atom))
    atom, first, stop = fragments.atom[order], fragments.first[order], fragments.stop[order]
    new = np.r_[True, atom[1:] != atom[:-1]]
    last = np.r_[new[1:], True]
    fits = (first == np.where(new, 0, np.r_[0, stop[:-1]])) & (first < stop) & (~last | (stop == atoms.rows[atom]))
    if not fits.all() or int(new.sum()) != len(atoms.record):
        raise CoverageError("the fragments of an atom are not all its rows once")
    if not atoms.owners[atoms.owner[fragments.atom], fragments.root].all():
        raise CoverageError("a fragment is to be sent by a trainer rank that does not hold it")


def _check_parcels(plan: "Plan") -> None:
    fragments, parcels, atoms = plan.fragments, plan.parcels, plan.template.atoms
    counts = np.diff(parcels.first_fragment)
    if parcels.first_fragment[0] != 0 or parcels.first_fragment[-1] != len(fragments) or (counts < 1).any():
        raise CoverageError("a fragment is in no parcel, or a parcel is empty")
    of = np.repeat(np.arange(len(parcels)), counts)
    if (fragments.root != parcels.root[of]).any():
        raise CoverageError("a parcel has fragments of several senders")
    if (np.bincount(of, weights=fragments.nbytes(atoms)) != parcels.nbytes).any():
        raise CoverageError("a parcel is not as large as its fragments")
    pair = np.unique(atoms.demand[fragments.atom] * len(parcels.routes) + parcels.route[of])
    demand, route = np.divmod(pair, len(parcels.routes))
    # Not only every GPU that wants it, but no class of nodes that does not.
    wanted, served = atoms.demands[demand], parcels.routes[route]
    if (wanted & ~served).any() or (some(wanted, 2) != some(served, 2)).any():
        raise CoverageError("a parcel does not go to the nodes that want its fragments")


def check_routes(plan: "Plan", parcel: IntArray = NONE_HELD, nic: IntArray = NONE_HELD) -> None:
    """Step 4. `parcel`, `nic`: pairs of what NICs hold before the first operation, as `resume` takes them.

    Raises:
        CoverageError: a parcel misses a node, comes twice, or is to be sent by whom has not got it.
    """
    operations, parcels, nodes = plan.operations, plan.parcels, plan.nodes
    node_of = nodes.number_of(plan.topology.nics)
    receiver = node_of[operations.receiver]
    if (receiver < 0).any():
        raise CoverageError("an operation goes to a NIC of no living engine")
    got = np.bincount(operations.parcel * np.int64(nodes.count) + receiver, minlength=len(parcels) * nodes.count)
    living = node_of[nic] >= 0
    got[np.unique(parcel[living] * nodes.count + node_of[nic[living]])] += 1
    wanted = np.tile(parcels.nodes_of_route[parcels.route], (1, nodes.members))
    if (got.reshape(len(parcels), nodes.count) != wanted).any():
        raise CoverageError("a parcel does not reach every node of its route exactly once")
    first = operations.after < 0
    _check_injections(plan, np.flatnonzero(first), parcel[living] * plan.topology.nics + nic[living])
    before = operations.after[~first]
    relayed = (operations.receiver[before] == operations.sender[~first]) & (
        operations.parcel[before] == operations.parcel[~first]
    )
    if not (relayed & (operations.round[before] < operations.round[~first])).all():
        raise CoverageError("a node is to pass on a parcel that it has not got by then")


def _check_injections(plan: "Plan", first: IntArray, held: IntArray) -> None:
    """Who starts with a parcel is its trainer, or holds it; `held`: parcel * NICs + NIC."""
    sender, parcel = plan.operations.sender[first], plan.operations.parcel[first]
    holds = np.isin(parcel * np.int64(plan.topology.nics) + sender, held)
    if not (holds | (sender == plan.parcels.root[parcel])).all():
        raise CoverageError("an operation injects a parcel from another rank than its sender")
