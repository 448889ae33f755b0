"""Runs a plan byte by byte on a trainer's parameters, and says from the families' placements what must come out.

The account to compare with knows nothing of the planner: gather the trainer's parameters to whole tensors by the
placements of every rank, quantise whole matrices, scatter to every engine rank by its placements. The families spell
out every rank and every parameter; the planner never does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slimerl.resharding.assemble import collect, scatter
from slimerl.resharding.coverage import owned_placements
from slimerl.resharding.families import family_of
from slimerl.resharding.families.family import Form
from slimerl.resharding.planner import Plan, Share, SyncShape, engine_share, trainer_share
from slimerl.resharding.quantise import FP8, on_the_wire, quantise_parameter
from slimerl.resharding.tensors import Placement

State = dict[str, torch.Tensor]
Bytes = np.ndarray
"""uint8, the last dimension counts the bytes of an element."""


@dataclass
class Written:
    """Parameters of an engine rank after a sync, and how often each element was written."""

    values: dict[str, Bytes]
    times: dict[str, np.ndarray]


class Trainer:
    """The trainer's ranks: every parameter random, replicas alike, padding full of what belongs nowhere."""

    def __init__(self, shape: SyncShape, seed: int) -> None:
        self.shape, family = shape, family_of(shape.config)
        form = Form(prediction=shape.form.prediction)
        tensors = family.checkpoint_tensors(shape.config, shape.dtype, form)
        generator = torch.Generator().manual_seed(seed)
        state = {t.name: torch.randn(t.shape, generator=generator).to(t.dtype) for t in tensors}
        self.tensors = {t.name: t for t in tensors}
        self.wire = {t.name: t for t in family.logical_tensors(shape.config, shape.dtype, shape.form)}
        self.placements = [
            family.megatron_placements(shape.config, shape.train, rank, form) for rank in range(shape.train.world_size)
        ]
        self.parameters = [_filled(placements, state) for placements in self.placements]
        self._ready: dict[tuple[Placement, ...], tuple[Bytes, Bytes | None]] = {}

    def gathered(self) -> dict[str, Bytes]:
        """Whole tensors as they travel, by the placements alone."""
        whole = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in self.tensors.items()}
        owned = owned_placements(self.placements, self.tensors.values())
        for placements, parameters in zip(owned, self.parameters, strict=True):
            collect(placements, parameters, whole)
        scales = self.shape.form.scales
        sent = whole if scales is None else dict(on_the_wire(whole.items(), self.wire, scales))
        return {name: as_bytes(sent[name].to(t.dtype)) for name, t in self.wire.items()}

    def ready(self, rank: int) -> tuple[dict[str, Bytes], dict[str, Bytes]]:
        """A rank's parameters as they travel, and the scales of those that are quantised; data-parallel replicas, whose
        pieces are the same, are computed once."""
        by_parameter: dict[str, list[Placement]] = {}
        for placement in self.placements[rank]:
            by_parameter.setdefault(placement.parameter, []).append(placement)
        values, scales = {}, {}
        for name, placements in by_parameter.items():
            key = tuple(placements)
            if key not in self._ready:
                self._ready[key] = self._converted(self.parameters[rank][name], placements)
            values[name], made = self._ready[key]
            if made is not None:
                scales[name] = made
        return values, scales

    def _converted(self, parameter: torch.Tensor, placements: Sequence[Placement]) -> tuple[Bytes, Bytes | None]:
        dtypes = {self.wire[place.tensor].dtype for place in placements if not place.is_padding}
        assert len(dtypes) <= 1, "one parameter becomes tensors of several dtypes"
        dtype = next(iter(dtypes), parameter.dtype)
        if dtype != FP8:
            return as_bytes(parameter.to(dtype)), None
        assert self.shape.form.scales is not None
        shapes = {place.tensor: self.tensors[place.tensor].shape for place in placements}
        made = quantise_parameter(parameter, placements, shapes, self.shape.form.scales)
        return as_bytes(made.data), as_bytes(made.scales)


def as_bytes(tensor: torch.Tensor) -> Bytes:
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8).numpy()


def run(plan: Plan, trainer: Trainer) -> list[list[Written]]:
    """Carry out all operations in order; [replica][rank] of the living replicas."""
    return store(plan, relay(plan, packed(plan, trainer), {}))


def packed(plan: Plan, trainer: Trainer) -> list[Bytes]:
    """Each parcel, as its trainer makes it."""
    parcels = [np.zeros(int(n), dtype=np.uint8) for n in plan.parcels.nbytes]
    filled = [np.zeros(int(n), dtype=np.int64) for n in plan.parcels.nbytes]
    for rank in range(plan.topology.trainer_ranks):
        share = trainer_share(plan, rank)
        assert sorted(set(share.segments.parcel.tolist())) == np.flatnonzero(plan.parcels.root == rank).tolist()
        values, scales = trainer.ready(rank)
        for parcel, begin, box in _boxes(share):
            source = scales if share.scales[box[0]] else values
            data = _region(source[share.names[box[0]]], box).tobytes()
            parcels[parcel][begin : begin + len(data)] = np.frombuffer(data, dtype=np.uint8)
            filled[parcel][begin : begin + len(data)] += 1
    assert all((times == 1).all() for times in filled), "a parcel's bytes are not packed exactly once"
    return parcels


Held = dict[tuple[int, int], Bytes]
"""(NIC, parcel) -> what the NIC took in."""


def relay(plan: Plan, parcels: list[Bytes], held: Held, operations: int | None = None) -> Held:
    """The first `operations` of the plan (all: None), begun with what NICs hold already; counts the bytes on the wire
    of every NIC against the plan's."""
    held = dict(held)
    sent, received = np.zeros((2, plan.topology.nics), dtype=np.int64)
    rows = zip(*(column[:operations].tolist() for column in plan.operations[:3]), strict=True)
    for sender, receiver, parcel in rows:
        if sender < plan.topology.trainer_ranks:
            assert plan.parcels.root[parcel] == sender
        data = parcels[parcel] if sender < plan.topology.trainer_ranks else held[sender, parcel]
        assert (receiver, parcel) not in held, "a NIC got a parcel twice"
        held[receiver, parcel] = data
        sent[sender] += len(data)
        received[receiver] += len(data)
    if operations is None:
        assert (sent == plan.nic_bytes[0]).all()
        assert (received == plan.nic_bytes[1]).all()
    return held


def store(plan: Plan, held: Held) -> list[list[Written]]:
    """What every rank of every living replica makes of the parcels in its node."""
    node_of = plan.nodes.number_of(plan.topology.nics)
    at_node: dict[tuple[int, int], Bytes] = {}
    for (nic, parcel), data in held.items():
        if node_of[nic] >= 0:
            assert (int(node_of[nic]), parcel) not in at_node, "a parcel entered a node by two NICs"
            at_node[int(node_of[nic]), parcel] = data
    topology = plan.topology
    written = []
    for replica in sorted(set(range(topology.replicas)) - topology.dead):
        first = topology.trainer_ranks + replica * topology.engine_ranks
        nodes = [int(node_of[first + rank]) for rank in range(topology.engine_ranks)]
        written.append([_stored(plan, replica, rank, nodes[rank], at_node) for rank in range(topology.engine_ranks)])
    return written


def check(plan: Plan, model: dict[str, Bytes], written: list[list[Written]]) -> None:
    """Every element that belongs to a tensor was written once, with its value; padding never."""
    shape = plan.shape
    family = family_of(shape.config)
    for rank in range(plan.topology.engine_ranks):
        placements = family.engine_placements(shape.config, shape.engine, rank, shape.form)
        expected = _scattered(placements, model)
        times = _scattered(placements, {name: np.ones(value.shape[:-1]) for name, value in model.items()}, False)
        for replica in written:
            got = replica[rank]
            assert got.times.keys() == expected.keys()
            for name, values in expected.items():
                counted = got.times[name].reshape(times[name].shape)
                assert (counted == times[name]).all(), f"{name}: elements written {np.unique(counted)} times"
                assert (got.values[name].reshape(values.shape)[counted > 0] == values[counted > 0]).all(), name


def _filled(placements: Sequence[Placement], state: State) -> State:
    shapes, dtypes = _shapes(placements), {}
    for placement in placements:
        if not placement.is_padding:
            dtypes[placement.parameter] = state[placement.tensor].dtype
    some = next(iter(dtypes.values()), torch.bfloat16)
    parameters = {name: torch.zeros(shape, dtype=dtypes.get(name, some)) for name, shape in shapes.items()}
    scatter(placements, state, parameters)
    for placement in placements:
        if placement.is_padding:
            placement.view_of(parameters[placement.parameter]).fill_(float("nan"))
    return parameters


def _shapes(placements: Sequence[Placement]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for placement in placements:
        seen = shapes.get(placement.parameter, placement.at.stops)
        shapes[placement.parameter] = tuple(map(max, seen, placement.at.stops))
    return shapes


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


def _scattered(placements: Sequence[Placement], model: dict[str, np.ndarray], bytes_: bool = True) -> dict[str, Bytes]:
    shapes, made = _shapes(placements), {}
    for placement in placements:
        if placement.is_padding:
            continue
        name, part = placement.parameter, model[placement.tensor][placement.box.slices]
        if name not in made:
            size = (*shapes[name], model[placement.tensor].shape[-1]) if bytes_ else shapes[name]
            made[name] = np.zeros(size, np.uint8 if bytes_ else np.int64)
        target = made[name][placement.at.slices]
        target += part.reshape(target.shape).astype(target.dtype)
    return made


def _stored(plan: Plan, replica: int, rank: int, node: int, at_node: dict[tuple[int, int], Bytes]) -> Written:
    shape, share = plan.shape, engine_share(plan, replica, rank)
    sizes = _shapes(family_of(shape.config).engine_placements(shape.config, shape.engine, rank, shape.form))
    values: dict[str, Bytes] = {}
    times: dict[str, np.ndarray] = {}
    for parcel, begin, box in _boxes(share):
        name, itemsize = share.names[box[0]], box[6]
        if name not in values:
            values[name] = np.zeros((*sizes[name], itemsize), np.uint8)
            times[name] = np.zeros(sizes[name], np.int64)
        target = _region(values[name], box)
        target[...] = at_node[node, parcel][begin : begin + target.size].reshape(target.shape)
        _region(times[name], box)[...] += 1
    return Written(values, times)
