"""Carries a plan out with the members' own code: one thread each, links of memory in place of a network."""

import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from slimerl.engine.inside.carry import Relay, Staged, Step, Traffic
from slimerl.engine.inside.digest import digest
from slimerl.engine.inside.links import LinkBroken
from slimerl.engine.inside.parcels import Contents, checksum, write
from slimerl.resharding.assemble import scatter
from slimerl.resharding.families import Form, family_of
from slimerl.resharding.planner import Plan, trainer_share
from slimerl.resharding.quantise import on_the_wire
from slimerl.resharding.shard_orders import engine_message, member_of, share_message, steps_of, transfers_of
from slimerl.resharding.shard_proof import SentDigests, ShardProof, holders_of, shard_granules
from slimerl.resharding.shard_quantise import WireParameters, scale_placements
from slimerl.resharding.shard_sender import Outbox
from slimerl.resharding.tensors import Placement
from slimerl.resilience.deadline import Deadline

WAIT_S = 10.0
CPU = torch.device("cpu")
Parameters = dict[str, torch.Tensor]
Corrupt = Callable[[int, int, torch.Tensor], torch.Tensor]


class _Done:
    def __init__(self, wait: Callable[[float], None]) -> None:
        self.wait = wait


class MemoryLink:
    """A rendezvous: a send ends when it has been received, as over a network without buffers."""

    device = CPU

    def __init__(self, network: "Network", ends: tuple[int, int]) -> None:
        self._network, self._ends = network, ends
        self._offers: queue.Queue[Any] = queue.Queue()

    def send(self, flat: torch.Tensor) -> _Done:
        taken = threading.Event()
        self._offers.put((flat, taken))

        def wait(seconds: float) -> None:
            if not taken.wait(seconds):
                raise LinkBroken("nobody took it")

        return _Done(wait)

    def receive(self, flat: torch.Tensor) -> _Done:
        def wait(seconds: float) -> None:
            try:
                sent, taken = self._offers.get(timeout=seconds)
            except queue.Empty:
                raise LinkBroken("nothing came") from None
            flat.copy_(self._network.through(self._ends, sent))
            taken.set()

        return _Done(wait)

    def close(self) -> None:
        pass


@dataclass
class Network:
    """All links, and the bytes that crossed each."""

    corrupt: Corrupt = lambda _sender, _receiver, flat: flat
    crossed: Counter[tuple[int, int]] = field(default_factory=Counter)
    _links: dict[tuple[int, int], MemoryLink] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, sender: int, receiver: int) -> MemoryLink:
        with self._lock:
            return self._links.setdefault((sender, receiver), MemoryLink(self, (sender, receiver)))

    def through(self, ends: tuple[int, int], flat: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self.crossed[ends] += flat.numel()
        return self.corrupt(*ends, flat)


@dataclass
class Outcome:
    network: Network
    engines: dict[tuple[int, int], Parameters]
    """[replica, rank]"""
    written: dict[tuple[int, int], int]
    sent_checksums: dict[int, int]
    taken_checksums: dict[int, dict[int, int]]
    """By member."""
    proof: ShardProof
    reports: dict[int, list[dict[str, int]]]
    """By replica: what each rank holds, digested."""


def random_tensors(plan: Plan, seed: int) -> Parameters:
    """The trainer's, of random bytes; random numbers where they are to be quantised."""
    shape, generator = plan.shape, torch.Generator().manual_seed(seed)
    tensors = family_of(shape.config).logical_tensors(shape.config, shape.dtype, Form(shape.form.prediction))
    if shape.form.scales is not None:
        return {t.name: torch.randn(t.shape, generator=generator).to(t.dtype) for t in tensors}
    made = {}
    for tensor in tensors:
        data = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
        made[tensor.name] = data.view(tensor.dtype).view(tensor.shape)
    return made


def filled(placements: list[Placement], logical: Parameters) -> Parameters:
    """A rank's parameters, by placements alone; padding is zero."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes = {p.parameter: logical[p.tensor].dtype for p in placements if not p.is_padding}
    for placement in placements:
        shapes[placement.parameter] = tuple(
            map(max, shapes.get(placement.parameter, placement.at.stops), placement.at.stops)
        )
    parameters = {name: torch.zeros(shape, dtype=dtypes.get(name, torch.bfloat16)) for name, shape in shapes.items()}
    scatter(placements, logical, parameters)
    return parameters


class Sync:
    """One transfer of a plan to all living engines; `run` it."""

    def __init__(self, plan: Plan, whole: Parameters, staged: bool, corrupt: Corrupt | None = None) -> None:
        self.plan, self.whole, self.staged = plan, whole, staged
        shape = plan.shape
        self.family = family_of(shape.config)
        tensors = self.family.logical_tensors(shape.config, shape.dtype, shape.form)
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.scales = shape.form.scales
        sent = whole if self.scales is None else dict(on_the_wire(whole.items(), self.tensors, self.scales))
        self.logical = sent
        """As engines hold them."""
        self.trainer = [
            self.family.megatron_placements(shape.config, shape.train, rank, Form(shape.form.prediction))
            for rank in range(plan.topology.trainer_ranks)
        ]
        self.engine = [
            self.family.engine_placements(shape.config, shape.engine, rank, shape.form)
            for rank in range(plan.topology.engine_ranks)
        ]
        self.granules = shard_granules(self.tensors, self.engine, self.trainer, self.scales)
        self.transfers = transfers_of(plan)
        self.network = Network() if corrupt is None else Network(corrupt)
        holders = holders_of(self.engine)
        self.holders = holders
        self.outcome = Outcome(self.network, {}, {}, {}, {}, ShardProof(holders, len(self.engine)), {})
        self._problems: list[BaseException] = []

    def run(self) -> Outcome:
        topology = self.plan.topology
        jobs: list[tuple[Callable[..., None], tuple[int, ...]]] = [
            (self._send, (rank,)) for rank in range(topology.trainer_ranks)
        ]
        living = sorted(set(range(topology.replicas)) - topology.dead)
        jobs += [(self._take, (replica, rank)) for replica in living for rank in range(topology.engine_ranks)]
        threads = [threading.Thread(target=self._guarded, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive()
        if self._problems:
            raise self._problems[0]
        for replica in living:
            self.outcome.reports[replica] = [self._digests(replica, rank) for rank in range(topology.engine_ranks)]
        return self.outcome

    def _guarded(self, job: Callable[..., None], arguments: tuple[int, ...]) -> None:
        try:
            job(*arguments)
        except BaseException as problem:  # noqa: BLE001 (told to the test)
            self._problems.append(problem)

    def _steps(self, member: int) -> list[Step]:
        return [Step(bool(row[0]), *row[1:]) for row in steps_of(self.transfers, member).tolist()]

    def _send(self, rank: int) -> None:
        steps = self._steps(rank)
        contents = Contents.of(share_message(self.plan, trainer_share(self.plan, rank)))
        placements, parameters = self.trainer[rank], filled(self.trainer[rank], self.whole)
        made: list[Placement] = []
        if self.scales is not None:
            made = scale_placements(placements, self.tensors, self.scales)
            parameters = WireParameters(parameters, placements, self.tensors, self.scales)
        digests = SentDigests(contents, [*placements, *made], self.tensors, self.holders, self.granules)
        outbox = Outbox(contents, digests, steps, parameters, CPU)
        Traffic(rank, steps, self.network.open).run(outbox, Deadline("a transfer", WAIT_S))
        assert not outbox._held
        self.outcome.sent_checksums.update(outbox.checksums)
        self.outcome.proof.add(digests.values)

    def _take(self, replica: int, rank: int) -> None:
        member = member_of(self.plan, replica, rank)
        steps, placements = self._steps(member), self.engine[rank]
        message = engine_message(self.plan, replica, rank, placements, self.tensors, self.granules)
        contents = Contents.of(message)
        # Every byte differs from what is to come, but for padding, which stays.
        parameters = filled(placements, {name: _inverted(value) for name, value in self.logical.items()})
        sums: dict[int, int] = {}
        written = 0

        def arrived(parcel: int, flat: torch.Tensor) -> None:
            nonlocal written
            sums[parcel] = checksum(flat)
            if not self.staged:
                written += write(flat, contents.segments.get(parcel, ()), parameters)

        begins, size = contents.slots()
        slots = {parcel: (begin, contents.nbytes[parcel]) for parcel, begin in begins.items()}
        staging = torch.zeros(size, dtype=torch.uint8)
        parcels = Staged(steps, arrived, staging, slots) if self.staged else Relay(steps, arrived, CPU)
        Traffic(member, steps, self.network.open).run(parcels, Deadline("a transfer", WAIT_S))
        assert not parcels._held or self.staged
        if self.staged:
            for parcel, segments in contents.segments.items():
                begin, nbytes = slots[parcel]
                written += write(staging[begin : begin + nbytes], segments, parameters)
        self.outcome.engines[replica, rank] = parameters
        self.outcome.written[replica, rank] = written
        self.outcome.taken_checksums[member] = sums

    def _digests(self, replica: int, rank: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for placement in self.engine[rank]:
            if placement.is_padding:
                continue
            name, box = placement.tensor, placement.box
            part = placement.view_of(self.outcome.engines[replica, rank][placement.parameter])
            shape, granule = self.tensors[name].shape, self.granules[name]
            value = digest(part, name, shape, (box.starts, box.stops), granule)
            found[name] = (found.get(name, 0) + value) % (1 << 64)
        return found


def check_exact(sync: Sync) -> None:
    """Every byte of every engine rank is the placements', written once; the wire carried what the plan says."""
    outcome, plan = sync.outcome, sync.plan
    for (replica, rank), parameters in outcome.engines.items():
        expected = filled(sync.engine[rank], sync.logical)
        assert parameters.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(_raw(parameters[name]), _raw(value)), (replica, rank, name)
        placed = sum(p.box.numel * sync.tensors[p.tensor].dtype.itemsize for p in sync.engine[rank] if not p.is_padding)
        assert outcome.written[replica, rank] == placed
    sent: Counter[int] = Counter()
    for (sender, _receiver), nbytes in outcome.network.crossed.items():
        sent[sender] += nbytes
    trainers = plan.topology.trainer_ranks
    assert [sent[rank] for rank in range(trainers)] == plan.nic_bytes[0][:trainers].tolist()
    assert sum(outcome.network.crossed.values()) == sum(sync.transfers.nbytes.tolist())
    for replica, reports in outcome.reports.items():
        outcome.proof.check(f"engine-{replica}", reports)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _inverted(tensor: torch.Tensor) -> torch.Tensor:
    return (~_raw(tensor)).view(tensor.dtype).view(tensor.shape)
