"""Runs a plan byte by byte on arrays, and says from the families' placements what must come out.

The families spell out every rank and every parameter; the planner never does. So the two accounts are independent but
for the tables themselves.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from slimerl.resharding.families import family_of
from slimerl.resharding.families.scales import scale_name
from slimerl.resharding.planner import Plan, Share, engine_share, trainer_share
from slimerl.resharding.tensors import Placement

Bytes = np.ndarray
"""uint8, the last dimension counts the bytes of an element."""


@dataclass
class Written:
    """Parameters of an engine rank after a sync, and how often each element was written."""

    values: dict[str, Bytes]
    times: dict[str, np.ndarray]


def random_model(plan: Plan, seed: int) -> dict[str, Bytes]:
    """Every logical tensor as the engine stores it, all bytes random."""
    shape, rng = plan.shape, np.random.default_rng(seed)
    tensors = family_of(shape.config).logical_tensors(shape.config, shape.dtype, shape.form)
    return {t.name: rng.integers(0, 256, (*t.shape, t.dtype.itemsize), dtype=np.uint8) for t in tensors}


def run(plan: Plan, model: dict[str, Bytes]) -> list[list[Written]]:
    """Carry out all operations in order; returns [replica][rank] for the living replicas, None-free."""
    topology = plan.topology
    parcels = _packed_by_trainers(plan, model)
    held: dict[tuple[int, int], Bytes] = {}
    for sender, receiver, parcel in zip(
        plan.operations.sender.tolist(), plan.operations.receiver.tolist(), plan.operations.parcel.tolist(), strict=True
    ):
        if sender < topology.trainer_ranks:
            assert plan.parcels.root[parcel] == sender
            data = parcels[parcel]
        else:
            data = held[sender, parcel]
        assert (receiver, parcel) not in held, "a node got a parcel twice"
        held[receiver, parcel] = data
    node_of = {int(nic): tuple(at) for at, nic in np.ndenumerate(plan.nodes.nic) if nic >= 0}
    at_node: dict[tuple[tuple[int, ...], int], Bytes] = {}
    for (nic, parcel), data in held.items():
        node = node_of[nic][:2]
        assert (node, parcel) not in at_node, "a parcel entered a node by two NICs"
        at_node[node, parcel] = data
    written = []
    for replica in sorted(set(range(topology.replicas)) - topology.dead):
        written.append([_stored(plan, replica, rank, at_node, node_of) for rank in range(topology.engine_ranks)])
    return written


def check(plan: Plan, model: dict[str, Bytes], written: list[list[Written]]) -> None:
    """Every element that belongs to a tensor was written once, with its value; padding never."""
    shape = plan.shape
    family = family_of(shape.config)
    for rank in range(plan.topology.engine_ranks):
        placements = family.engine_placements(shape.config, shape.engine, rank, shape.form)
        expected = _filled(placements, model)
        times = _filled(placements, {name: np.ones(value.shape[:-1]) for name, value in model.items()}, bytes_=False)
        for replica in written:
            got = replica[rank]
            for name, values in expected.items():
                counted = got.times.get(name)
                assert counted is not None, f"{name} was never written"
                counted = _like(counted, times[name])
                assert (counted == times[name]).all(), f"{name}: elements written {np.unique(counted)} times"
                assert (_like(got.values[name], values)[times[name] > 0] == values[times[name] > 0]).all(), name
            assert not got.times.keys() - expected.keys()


def _packed_by_trainers(plan: Plan, model: dict[str, Bytes]) -> list[Bytes]:
    shape = plan.shape
    family, packed = family_of(shape.config), [np.zeros(int(n), dtype=np.uint8) for n in plan.parcels.nbytes]
    filled = [np.zeros(int(n), dtype=np.int64) for n in plan.parcels.nbytes]
    for rank in range(plan.topology.trainer_ranks):
        placements = family.megatron_placements(shape.config, shape.train, rank, shape.form)
        parameters, scales = _filled(placements, model), _scales(plan, placements, model)
        share = trainer_share(plan, rank)
        assert sorted(set(share.segments.parcel.tolist())) == np.flatnonzero(plan.parcels.root == rank).tolist()
        for parcel, begin, box in _boxes(share):
            name, is_scale = share.names[box[0]], share.scales[box[0]]
            data = _region(scales[name] if is_scale else parameters[name], box).tobytes()
            packed[parcel][begin : begin + len(data)] = np.frombuffer(data, dtype=np.uint8)
            filled[parcel][begin : begin + len(data)] += 1
    assert all((times == 1).all() for times in filled), "a parcel's bytes are not packed exactly once"
    return packed


def _boxes(share: Share) -> list[tuple[int, int, tuple[int, ...]]]:
    """Parcel, offset and (parameter, slice, row, rows, column, columns, itemsize) of each segment."""
    rows = zip(*(column.tolist() for column in share.segments), strict=True)
    return [(parcel, offset, tuple(rest)) for parcel, offset, *rest in rows]


def _region(parameter: np.ndarray, box: tuple[int, ...]) -> np.ndarray:
    _, slice_, row, rows, column, columns, *_ = box
    inside = parameter if slice_ < 0 else parameter[slice_]
    if inside.ndim < (3 if inside.dtype == np.uint8 else 2):
        inside = inside[None]
    return inside[row : row + rows, column : column + columns]


def _filled(placements: list[Placement], model: dict[str, np.ndarray], bytes_: bool = True) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {}
    itemsize: dict[str, int] = {}
    for placement in placements:
        name = placement.parameter
        shapes[name] = tuple(map(max, shapes.get(name, placement.at.stops), placement.at.stops))
        if not placement.is_padding:
            itemsize[name] = model[placement.tensor].shape[-1]
    made = {}
    for name in itemsize:
        shape = shapes[name]
        made[name] = np.zeros((*shape, itemsize[name]), np.uint8) if bytes_ else np.zeros(shape, np.int64)
    for placement in placements:
        if not placement.is_padding:
            part = model[placement.tensor][placement.box.slices]
            made[placement.parameter][placement.at.slices] = part.reshape(
                made[placement.parameter][placement.at.slices].shape
            )
    return made


def _scales(plan: Plan, placements: list[Placement], model: dict[str, Bytes]) -> dict[str, Bytes]:
    """What a quantiser makes of each parameter: the scales of its pieces, one piece's below the other's."""
    if plan.shape.form.scales is None:
        return {}
    blocks, pieces = plan.shape.form.scales.blocks, defaultdict(list)
    for placement in placements:
        scale = model.get(scale_name(placement.tensor))
        if scale is not None:
            box = tuple(slice(blocks(s.start), blocks(s.stop)) for s in placement.box.slices)
            pieces[placement.parameter].append(scale[box])
    return {name: np.concatenate(parts) for name, parts in pieces.items()}


def _stored(
    plan: Plan,
    replica: int,
    rank: int,
    at_node: dict[tuple[tuple[int, ...], int], Bytes],
    node_of: dict[int, tuple[int, ...]],
) -> Written:
    topology, shape = plan.topology, plan.shape
    nic = topology.trainer_ranks + replica * topology.engine_ranks + rank
    share = engine_share(plan, replica, rank)
    placements = family_of(shape.config).engine_placements(shape.config, shape.engine, rank, shape.form)
    sizes = {placement.parameter: placement.at.stops for placement in placements}
    for placement in placements:
        sizes[placement.parameter] = tuple(map(max, sizes[placement.parameter], placement.at.stops))
    values: dict[str, Bytes] = {}
    times: dict[str, np.ndarray] = {}
    for parcel, begin, box in _boxes(share):
        name, itemsize = share.names[box[0]], box[6]
        if name not in values:
            values[name] = np.zeros((*sizes[name], itemsize), np.uint8)
            times[name] = np.zeros(sizes[name], np.int64)
        data = at_node[node_of[nic][:2], parcel]
        target = _region(values[name], box)
        target[...] = data[begin : begin + target.size].reshape(target.shape)
        _region(times[name], box)[...] += 1
    return Written(values, times)


def _like(array: np.ndarray, other: np.ndarray) -> np.ndarray:
    return array.reshape(other.shape)
