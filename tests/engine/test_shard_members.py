"""Sender, station and receivers as they are, in one process without an engine: a transfer, and whom it leaves out."""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from slimerl.engine.inside import links
from slimerl.engine.inside.digest import digest
from slimerl.engine.inside.links import GroupLinks, LinkBroken
from slimerl.engine.inside.mailbox import Mailbox
from slimerl.engine.inside.receiver import NothingStaged, Receiver
from slimerl.resharding.assemble import scatter
from slimerl.resharding.families import family_of
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology
from slimerl.resharding.shard_trainer import ShardModel, TrainerMember
from slimerl.resharding.shard_transfer import Outcome, Sender
from slimerl.resharding.sync_plan import plan_sync
from slimerl.resharding.tensors import Placement
from slimerl.resharding.transports.shards import Station
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.samples.messages import EngineInfo

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
ENGINES = [EngineInfo(f"engine-{number}", "http://127.0.0.1:1", "key", 1) for number in range(3)]
NAMES = [engine.engine_id for engine in ENGINES]
TRAINERS = 1
"""Members are numbered: the trainer's rank, then the engines."""
ATTEMPT_S = 3.0
Weights = dict[str, torch.Tensor]


class Holder:
    """What a receiver needs of a model."""

    def __init__(self, parameters: Weights) -> None:
        self.parameters_by_name = parameters

    def named_parameters(self) -> Any:
        return self.parameters_by_name.items()

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(self.parameters_by_name.values())


def filled(placements: list[Placement], logical: Mapping[str, torch.Tensor]) -> Weights:
    parameters: Weights = {}
    for placement in placements:
        held = parameters.get(placement.parameter)
        shape = placement.at.stops if held is None else tuple(map(max, held.shape, placement.at.stops))
        parameters[placement.parameter] = torch.zeros(shape)
    scatter(placements, logical, parameters)
    return parameters


class Route:
    """A trainer's rank and three engines of one."""

    def __init__(self, staged: bool) -> None:
        family, layout, engine = family_of(CONFIG), MegatronLayout(), EngineLayout()
        plan = plan_sync(CONFIG, family, layout, [0], engine, torch.float32, 1024)
        self.placements = plan.engine_ranks[0]

        def shape_of(engines: int) -> SyncShape:
            return SyncShape(CONFIG, layout, engine, Topology(TRAINERS, 1, engines, 1), torch.float32)

        model = ShardModel(plan, plan.trainer_ranks, shape_of)
        random = torch.Generator().manual_seed(1)
        self.state = {tensor.name: torch.randn(tensor.shape, generator=random) for tensor in plan.tensors}
        self.parameters = filled(plan.trainer_ranks[0], self.state)
        self.station = Station(20.0, {})
        mailbox = Mailbox(member="trainer/0", **self.station.address)
        self.own = TrainerMember(model, 0, lambda: self.parameters, mailbox)
        self.sender = Sender(model, self.station, self.own, ATTEMPT_S, staged, "gloo")
        self.receivers: dict[str, Receiver] = {}
        for name in NAMES:
            empty = {tensor: torch.zeros_like(value) for tensor, value in self.state.items()}
            member = f"{self.station.reopen(name)}/0"
            holder: Any = Holder(filled(self.placements, empty))
            self.receivers[name] = Receiver(holder, Mailbox(member=member, **self.station.address))
            self.receivers[name].start()

    def __enter__(self) -> "Route":
        return self

    def __exit__(self, *_error: object) -> None:
        self.own.close()
        for receiver in self.receivers.values():
            receiver.close()
        self.station.close()

    def step(self) -> None:
        for tensor in self.parameters.values():
            tensor.mul_(1.01)

    def send(self, version: int, seconds: float = 10 * ATTEMPT_S) -> Outcome:
        return self.sender.send(version, ENGINES, lambda _engines: {}, Deadline("the transfer", seconds))

    def assert_holds(self, name: str, outcome: Outcome) -> None:
        """After the commit: every digest is that of what was sent."""
        receiver = self.receivers[name]
        weights = receiver._model.parameters_by_name  # type: ignore[attr-defined]
        receiver.commit(outcome.transfer, weights)
        found: dict[str, int] = {}
        for place in receiver.placements:
            tensor, at = place["tensor"], tuple(slice(*ends) for ends in zip(*place["at"], strict=True))
            starts, stops = place["box"]
            part = weights[place["parameter"]][at].view([b - a for a, b in zip(starts, stops, strict=True)])
            value = digest(part, tensor, place["shape"], place["box"], place["granule"])
            found[tensor] = (found.get(tensor, 0) + value) % (1 << 64)
        outcome.proof.check(name, [found])


class Mute:
    """An operation that never ends."""

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
        raise LinkBroken("nothing came", stood_still=True)


class DeadLink:
    """A link whose packets are lost in both directions; nobody closes it."""

    def __init__(self, intact: Any) -> None:
        self._intact, self.device = intact, intact.device

    def send(self, _flat: torch.Tensor) -> Mute:
        return Mute()

    receive = send

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self._intact.close()


def without_network(patched: pytest.MonkeyPatch, member: int) -> None:
    """Fault: from its next links on, nothing leaves or reaches this member but orders and reports."""
    intact = GroupLinks.__call__

    def opened(self: GroupLinks, sender: int, receiver: int) -> Any:
        link = intact(self, sender, receiver)
        return DeadLink(link) if self._member == member else link

    patched.setattr(links.GroupLinks, "__call__", opened)


@pytest.fixture(params=[True, False], ids=["staged", "straight"])
def route(request: pytest.FixtureRequest) -> Iterator[Route]:
    with torch.no_grad(), Route(request.param) as route:
        yield route


@pytest.fixture
def staged() -> Iterator[Route]:
    with torch.no_grad(), Route(True) as route:
        yield route


def test_every_engine_holds_every_version(route: Route) -> None:
    for version in (1, 2, 3):
        outcome = route.send(version)
        assert (outcome.engines, outcome.failures) == (NAMES, {})
        for name in NAMES:
            route.assert_holds(name, outcome)
        route.step()


def test_w6_parameters_that_are_not_contiguous_arrive_as_they_are(route: Route) -> None:
    """Fault: every matrix of the trainer is a transposed view."""
    for name, tensor in route.parameters.items():
        if tensor.dim() == 2:
            route.parameters[name] = tensor.t().contiguous().t()
            assert not route.parameters[name].is_contiguous()
    outcome = route.send(1)
    for name in NAMES:
        route.assert_holds(name, outcome)


def test_w6_a_staging_buffer_that_has_been_filled_again_is_not_taken_for_the_earlier_transfer(staged: Route) -> None:
    """Fault: a commit comes late, while the next transfer fills the buffer, and after it has."""
    first, refused = staged.send(1), []
    receiver = staged.receivers["engine-2"]
    intact = receiver._kept

    def commit_meanwhile(parcel: int, flat: torch.Tensor) -> None:
        with pytest.raises(NothingStaged):
            receiver.commit(first.transfer, {})
        refused.append(parcel)
        intact(parcel, flat)

    receiver._kept = commit_meanwhile  # type: ignore[method-assign]
    staged.step()
    second = staged.send(2)
    assert refused
    assert second.engines == NAMES
    with pytest.raises(NothingStaged):
        receiver.commit(first.transfer, {})
    staged.assert_holds("engine-2", second)


def test_w12_an_engine_that_stands_still_is_named_and_the_others_get_the_version(staged: Route) -> None:
    """Fault: a receiver stands still at its first parcel."""
    staged.send(1)
    victim, awake = staged.receivers["engine-1"], threading.Event()
    intact = victim._kept

    def stand_still(parcel: int, flat: torch.Tensor) -> None:
        awake.wait(20)
        intact(parcel, flat)

    victim._kept = stand_still  # type: ignore[method-assign]
    staged.step()
    try:
        outcome = staged.send(2)
    finally:
        awake.set()
    assert outcome.engines == ["engine-0", "engine-2"]
    assert "engine-1 (engine-1.1/0): no answer within 3 s" in outcome.failures["engine-1"]
    for name in outcome.engines:
        staged.assert_holds(name, outcome)


def test_w12_an_engine_without_a_network_but_with_a_working_control_is_blamed_and_the_others_get_the_version(
    staged: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: an engine's data links lose everything; its receiver still answers. Every member reports a broken link."""
    without_network(monkeypatch, TRAINERS + 1)
    outcome = staged.send(1)
    name = "engine-1"
    assert list(outcome.failures) == [name]
    assert f"{name} ({name}.1/0): the transfer stood still at " in outcome.failures[name]
    assert outcome.engines == [other for other in NAMES if other != name]
    for other in outcome.engines:
        staged.assert_holds(other, outcome)


def test_w12_no_attempt_is_begun_that_could_end_after_the_deadline(
    staged: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: an engine has no network, and what its attempt left is not enough for another, or just enough."""
    without_network(monkeypatch, TRAINERS + 1)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"raise deadlines\.sync_s \(.*parcel"):
        staged.send(1, seconds=1.2 * ATTEMPT_S)
    assert time.monotonic() - began < 1.2 * ATTEMPT_S
    assert staged.send(2, seconds=1.7 * ATTEMPT_S).engines == ["engine-0", "engine-2"]
    assert time.monotonic() - began < (1.2 + 1.7) * ATTEMPT_S
