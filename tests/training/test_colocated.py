"""Turns of trainer and engines over the whole loop, with real ranks and HTTP: what moves when, what is refused, and
what is left where a turn fails. The transfer itself stands aside: it is the same as elsewhere."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from machine_steps import Variant, prepare, train, weights_of
from test_loop import STEPS, RecordingLog, run_loop, run_spec
from trainer_control_service import ControlService

from slimerl.samples.messages import HoldReply, HoldRequest, ReleaseRequest
from slimerl.spec.schema import ParallelSpec, RunSpec

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))

from fake_engine import FakeEngine

CALL_S = 10.0
LEASE_S = 50.0


@contextmanager
def fake_engines(count: int) -> Iterator[list[FakeEngine]]:
    """Servers that have just started and left the GPUs to the trainer."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engines = [FakeEngine(f"engine-{index}") for index in range(count)]
    try:
        for engine in engines:
            engine.memory, engine.paused = set(), True
            asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
        yield engines
    finally:
        for engine in engines:
            asyncio.run_coroutine_threadsafe(engine.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Desk:
    """The rollout role's side: grants every hold."""

    def __init__(self, engines: list[FakeEngine], events: list[Any]) -> None:
        self._engines, self._events = engines, events
        self.released: list[ReleaseRequest] = []

    def hold(self, request: HoldRequest) -> HoldReply:
        self._events.append(f"hold {request.version}")
        assert request.lease_s == LEASE_S
        return HoldReply(f"lease-{request.version}", [engine.info for engine in self._engines])

    def release(self, request: ReleaseRequest) -> None:
        self._events.append(f"release {request.version}")
        self.released.append(request)


class Writer:
    """`WeightSyncer` without the transfer: notes what lies on the device when it would take place."""

    def __init__(self, desk: Desk | None, chunks: Any, optimizer: Any, events: list[Any]) -> None:
        self._desk, self._chunks, self._optimizer, self._events = desk, chunks, optimizer, events
        self.fails_on: int | None = None
        """The rank that fails."""

    def hold(self, version: int, lease_s: float) -> Any:
        from slimerl.resharding.sync import WeightLease

        return WeightLease(self._desk, version, lease_s, CALL_S)

    def write(self, lease: Any, clock: Any) -> None:
        self._events.append(f"write with {', '.join(on_device(self._chunks, self._optimizer))}")
        if self.fails_on == torch.distributed.get_rank():
            raise ValueError("injected: no room for a bucket")
        if lease is not None:
            lease.fleet.begin_weight_update()
            lease.fleet.end_weight_update(lease.version)


def on_device(chunks: Any, optimizer: Any) -> list[str]:
    from slimerl.training.hand_over import _optimizer_tensors

    buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
    weights = {buffer.param_data.untyped_storage()._cdata for buffer in buffers}
    of_optimizer = [t for t in _optimizer_tensors(optimizer) if t.untyped_storage()._cdata not in weights]
    parts = {
        "weights": [buffer.param_data for buffer in buffers],
        "gradients": [buffer.grad_data for buffer in buffers],
        # in float32 the master weights are the weights
        "moments": of_optimizer,
    }
    return [name for name, tensors in parts.items() if any(t.untyped_storage().nbytes() for t in tensors)]


def in_turns(stack: ExitStack, chunks: Any, optimizer: Any, events: list[Any], engines: int = 1) -> SimpleNamespace:
    """The turns of this rank: `syncer`, `writer`, and on the first rank `engines` and `desk`."""
    from slimerl.training.colocated import ColocatedSyncer
    from slimerl.training.hand_over import TrainerParts, share_problems

    is_first = torch.distributed.get_rank() == 0
    fakes = stack.enter_context(fake_engines(engines)) if is_first else []
    for fake in fakes:
        fake.called = lambda path: events.append(path)
    desk = Desk(fakes, events) if is_first else None
    writer = Writer(desk, chunks, optimizer, events)
    syncer = ColocatedSyncer(writer, TrainerParts(chunks, optimizer), share_problems, LEASE_S, is_first)
    return SimpleNamespace(syncer=syncer, writer=writer, engines=fakes, desk=desk)


class RecordingCheckpoints:
    stopping = False

    def __init__(self, events: list[Any], policy: Any) -> None:
        self._events, self._policy = events, policy

    def trained(self, step: int) -> None: ...

    def after_step(self, step: int) -> None:
        there = on_device(self._policy.chunks, self._policy.state.optimizer)
        self._events.append(f"save {step} with {', '.join(there)}")

    def take_figures(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def run_in_turns(spec: RunSpec) -> tuple[list[Any], list[Any]]:
    """The whole loop; (events of this rank, what was released)."""
    import megatron_patches

    megatron_patches.apply()
    from slimerl.resilience.deadline import Deadline
    from slimerl.training import assembly, loop, parallel
    from slimerl.training.capabilities import detect
    from slimerl.training.rollout_client import RolloutClient
    from slimerl.training.rollout_source import RolloutSource

    here = detect()
    grid = parallel.start(spec.training.parallel, here, here.device(0), 60, spec.seed)
    policy = assembly.build_policy(spec, grid, here)
    client = RolloutClient.connect(spec.run_dir, Deadline("the service", 10), 10) if grid.is_leader else None
    events: list[Any] = []
    source = RolloutSource(spec, grid, policy.algorithm, policy.batching, client)
    with ExitStack() as stack:
        turns = in_turns(stack, policy.chunks, policy.state.optimizer, events)
        loop.train(
            loop.Run(
                spec,
                policy.trainer,
                source,
                turns.syncer,
                RecordingLog(events),
                lambda: policy.export(spec.export_dir),
                checkpoints=RecordingCheckpoints(events, policy),
                turns=turns.syncer,
            )
        )
        turns.syncer.close()
        return events, turns.desk.released if turns.desk else []


TAKE_BACK = ["/pause_generation", "/release_memory_occupation kv_cache weights"]


def publishing(version: int, held: bool) -> list[Any]:
    return [
        ("sync", version),
        *([] if held else [f"hold {version}"]),
        "/resume_memory_occupation weights",
        "write with weights",
        "/begin_weight_update",
        "/end_weight_update",
        "/update_weight_version",
        "/resume_memory_occupation kv_cache",
        "/flush_cache",
        "/continue_generation",
        f"release {version}",
    ]


@pytest.mark.parametrize("parallel", [ParallelSpec(), ParallelSpec(data=2)], ids=["alone", "DP2"])
def test_a4_memory_changes_hands_in_one_order_and_the_model_is_that_of_a_run_without_turns(ranks, tmp_path, parallel):
    """Fault it guards against: memory moves while the other side uses it; the fake engine refuses that as SGLang."""
    tiny.write_model(tmp_path / "model", "qwen3")
    spec = run_spec(tmp_path, parallel)
    with ControlService(spec.run_dir, STEPS):
        [events, released], *others = ranks.run(parallel.world_size, run_in_turns, spec)
    exported = (spec.export_dir / "model.safetensors").read_bytes()
    with ControlService(spec.run_dir, STEPS):
        ranks.run(parallel.world_size, run_loop, spec)
    assert (spec.export_dir / "model.safetensors").read_bytes() == exported

    expected = [*publishing(0, held=False), ("evaluate", 0)]
    for step in range(1, STEPS + 1):
        everything = "weights, gradients, moments"
        expected += [("wait", step), ("fetch", step), ("hand over", step), f"hold {step}", *TAKE_BACK, ("train", step)]
        expected += [("checkpoint", step), f"save {step} with {everything}", *publishing(step, held=True)]
    # the model is written by a trainer that has its memory
    expected += [("evaluate", STEPS), ("hand over", STEPS), f"hold {STEPS}", *TAKE_BACK, ("export", STEPS)]
    assert [each for each in events if each[0] not in ("alarm", "note")] == expected
    assert released == [ReleaseRequest(f"lease-{v}", v, ["engine-0"], {}) for v in range(STEPS + 1)]
    for elsewhere, _ in others:
        assert [each for each in elsewhere if str(each).startswith("write")] == ["write with weights"] * (STEPS + 1)


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory) -> tuple[Path, dict[str, float]]:
    """A model, and the figures of its second step where nothing happens between the first and it."""
    directory = tmp_path_factory.mktemp("model")
    tiny.write_model(directory, "qwen3")
    [(figures, _), _] = ranks.run(2, train, directory, ParallelSpec(data=2), Variant(), 2)
    return directory, figures[1]


FAULTS = {
    "the engines cannot take their weights": "/resume_memory_occupation weights",
    "the engines cannot take their KV cache": "/resume_memory_occupation kv_cache",
    "the engines do not go on": "/continue_generation",
    "the engines do not give their memory up": "/release_memory_occupation",
    "the first rank fails in the transfer": 0,
    "another rank fails in the transfer": 1,
}


def fail_in_the_middle(model_path: Path, fault: str | int) -> tuple[str, list[Any], bool, dict[str, float]]:
    """(what this rank raised, what was released, weights the same, figures of a step afterwards)."""
    machine = prepare(model_path, ParallelSpec(data=2), Variant())
    machine.trainer.step(machine.packs(0))
    before, raised = weights_of(machine), ""
    with ExitStack() as stack:
        turns = in_turns(stack, machine.trainer.chunks, machine.optimizer, [], engines=2)
        if isinstance(fault, int):
            turns.writer.fails_on = fault
        for engine in turns.engines:
            engine.refusing = {fault}
        try:
            turns.syncer.sync(1)
            turns.syncer.before_training(2)
        except (RuntimeError, ValueError) as error:
            raised = f"{type(error).__name__}: {error}"
        same = all(torch.equal(tensor, before[name]) for name, tensor in weights_of(machine).items())
        return raised, turns.desk.released if turns.desk else [], same, machine.trainer.step(machine.packs(1))


@pytest.mark.parametrize("case", FAULTS)
def test_a4_a_turn_that_fails_leaves_engines_named_dirty_and_the_trainers_state_whole(ranks, undisturbed, case):
    """Injected: the fault that the case is named after, in both engines or on one of two ranks."""
    directory, plain = undisturbed
    fault = FAULTS[case]
    [first, second] = ranks.run(2, fail_in_the_middle, directory, fault)
    own = "ValueError: injected: no room" if isinstance(fault, int) else None
    for rank, (raised, _, same, figures) in enumerate((first, second)):
        assert raised.startswith(own if own and rank == fault else "HandOverFailed: memory could not be handed over")
        assert "injected" in raised
        assert same
        assert figures == pytest.approx(plain, rel=1e-6)
    last = first[1][-1]
    assert last.whole == []
    assert set(last.dirty) == {"engine-0", "engine-1"}
    assert all("injected" in reason for reason in last.dirty.values())


def one_engine_fails(model_path: Path) -> tuple[list[Any], list[str]]:
    machine = prepare(model_path, ParallelSpec(), Variant())
    machine.trainer.step(machine.packs(0))
    with ExitStack() as stack:
        events: list[Any] = []
        turns = in_turns(stack, machine.trainer.chunks, machine.optimizer, events, engines=2)
        turns.engines[1].refusing = {"/resume_memory_occupation"}
        turns.syncer.sync(1)
        turns.engines[1].refusing = set()
        events.clear()
        turns.syncer.before_training(2)
        machine.trainer.step(machine.packs(1))
        turns.syncer.sync(2)
        return turns.desk.released, events


def test_w2_an_engine_that_failed_a_turn_is_dirty_and_asked_for_nothing_more_the_others_go_on(ranks, tmp_path):
    """Injected: one of two engines cannot take its weights' memory. What it holds nobody knows; it may come back once
    it was restarted."""
    tiny.write_model(tmp_path, "qwen3")
    [(released, events)] = ranks.run(1, one_engine_fails, tmp_path)
    assert [each.whole for each in released] == [["engine-0"], ["engine-0"]]
    assert "injected: /resume_memory_occupation weights" in released[0].dirty["engine-1"]
    assert released[1].dirty == {"engine-1": "engine-1: it failed to hand its memory over earlier; restart it"}
    assert [each for each in events if each.startswith("/release")] == [TAKE_BACK[1]]


def wrong_turns(model_path: Path) -> list[str]:
    from slimerl.training.colocated import LeasedEngines

    machine = prepare(model_path, ParallelSpec(), Variant())
    machine.trainer.step(machine.packs(0))
    found = []
    with pytest.raises(RuntimeError) as unheld:
        LeasedEngines().release_memory([])
    found.append(str(unheld.value))
    for first, second in (("sync", "sync"), ("before_training", "")):
        with ExitStack() as stack:
            events: list[Any] = []
            turns = in_turns(stack, machine.trainer.chunks, machine.optimizer, events)
            if second:
                getattr(turns.syncer, first)(1)
            before = len(events)
            with pytest.raises(RuntimeError) as refused:
                getattr(turns.syncer, first)(2)
            moved = [each for each in events[before:] if "memory" in each]
            found.append(f"{type(refused.value).__name__}: {refused.value}; moved: {moved}")
            found.append(turns.desk.released[-1].dirty["engine-0"])
            assert all(parameter.isfinite().all() for parameter in machine.built.chunks[0].parameters())
    return found


def test_a4_a_turn_out_of_order_is_refused_before_anything_moves(ranks, tmp_path):
    """Injected: two syncs with no training between them, training that begins where the trainer has its memory, and a
    move without a hold."""
    tiny.write_model(tmp_path, "qwen3")
    [(unheld, twice, dirty, early, _)] = ranks.run(1, wrong_turns, tmp_path)
    assert unheld == "the engines are not held; their memory moves during a hold only"
    assert twice == ("OutOfOrder: memory cannot pass from training to syncing: the phase is generating; moved: []")
    assert dirty.startswith("the update to version 2 was not finished: memory cannot pass")
    assert early == "OutOfOrder: memory cannot pass from generating to training: the phase is training; moved: []"


def test_the_trainer_waits_until_every_engine_has_left_the_gpus() -> None:
    from slimerl.resilience.deadline import Deadline, DeadlineExceeded
    from slimerl.training.colocated import wait_for_room

    status = SimpleNamespace(engines=["engine-0"])
    with pytest.raises(DeadlineExceeded, match="1 of 2 have registered"):
        wait_for_room(lambda: status, 2, Deadline("the engines to leave", 0.05))
