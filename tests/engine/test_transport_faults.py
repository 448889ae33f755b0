"""What goes wrong on the way: an engine that dies or hangs, a torn file, a full disk. The others are served, and who
was set aside comes back only with a whole, proven rewrite."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import transformers
from engine_fixtures import Engines, RunningEngine
from reference import largest_difference, logprobs_of
from tiny_models import tiny_model
from weights import TIMEOUT_S, TRANSPORTS, Plan, open_carrier, open_update, update

from slimerl.engine.fleet import EngineFleet, NoEngineLeft
from slimerl.engine.protocol import SamplingParams
from slimerl.resharding.proof import WeightProof
from slimerl.resharding.transports.carrier import NothingSent
from slimerl.resharding.transports.disk import BucketNotWritten
from slimerl.samples.messages import EngineInfo

PROMPT = [10, 20, 30, 40, 50]
HANG_S = 3.0
"""An engine's timeout where one hangs; the group's is a third of it."""


@pytest.fixture(scope="module")
def two(engines: Engines) -> Iterator[list[RunningEngine]]:
    """The session's engine, and one that tests may harm."""
    steady = engines("qwen3")
    with engines.brief(("qwen3", 1)) as [victim]:
        yield [steady, victim]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


def other_model(engine: RunningEngine, seed: int) -> Any:
    config = transformers.AutoConfig.from_pretrained(engine.model_path)
    return tiny_model(config.model_type, seed=seed, tied=config.tie_word_embeddings)


def assert_is(engine: RunningEngine, model: Any, version: int) -> None:
    result = engine.ask(lambda client: client.generate(PROMPT, SamplingParams(16, temperature=0.0)))
    assert largest_difference(logprobs_of(model, PROMPT, result.tokens), result.logprobs) < 1e-4
    assert set(result.versions) == {version}


def processes(engine: RunningEngine) -> list[psutil.Process]:
    root = psutil.Process(engine.server.process.pid)
    return [root, *root.children(recursive=True)]


@contextmanager
def standing_still(engine: RunningEngine) -> Iterator[None]:
    """The engine's ranks are stopped; its HTTP server still takes requests."""
    ranks = [process for process in processes(engine) if process.name().startswith("sglang::sched")]
    assert ranks
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)


def send_all(carrier: Any, plan: Plan, model: Any, before_bucket: dict[int, Any]) -> WeightProof:
    """Every bucket; `before_bucket[n]` is called before bucket n is sent."""
    proof = WeightProof(plan.tensors, plan.placements)
    for number, bucket in enumerate(plan.buckets(model)):
        before_bucket.get(number, lambda: None)()
        carrier.send(bucket)
        for name, tensor in bucket:
            proof.add(name, tensor)
    return proof


def load_all(carrier: Any, plan: Plan, model: Any) -> None:
    send_all(carrier, plan, model, {})
    carrier.wait()


def test_w1_several_engines_take_one_update_over_every_transport(two: list[RunningEngine], transport: str) -> None:
    model = other_model(two[0], seed=30)
    assert update(two[0], model, 1, [two[1].info], transport) == {}
    for engine in two:
        assert_is(engine, model, 1)


def test_w12_an_engine_that_hangs_is_set_aside_by_name_and_the_other_gets_the_version_in_time(
    two: list[RunningEngine], transport: str
) -> None:
    """Fault: an engine's scheduler stands still from the second bucket on."""
    steady, victim = two
    plan, model = Plan(steady), other_model(steady, seed=31)
    began = time.monotonic()
    with EngineFleet([victim.info, steady.info], HANG_S) as fleet, standing_still_later(victim) as stop:
        fleet.pause()
        fleet.begin_weight_update()
        with open_carrier(transport, fleet, HANG_S) as carrier:
            proof = send_all(carrier, plan, model, {1: stop})
            assert carrier.prove(2, plan.placements, proof) == [steady.info.engine_id]
        fleet.end_weight_update(2)
        fleet.flush_cache()
        fleet.continue_generation()
        assert time.monotonic() - began < 3 * HANG_S
        assert list(fleet.failures) == [victim.info.engine_id]
        assert f"no answer within {HANG_S:g} s" in fleet.failures[victim.info.engine_id]
    assert_is(steady, model, 2)
    # Awake again it is dirty, in a session left open, perhaps in a group that is gone: one whole rewrite mends it.
    again = other_model(steady, seed=32)
    assert update(steady, again, 3, [victim.info], transport) == {}
    for engine in two:
        assert_is(engine, again, 3)


@contextmanager
def standing_still_later(engine: RunningEngine) -> Iterator[Any]:
    """Gives a function that stops the engine's ranks; they go on at the end."""
    entered: list[Any] = []

    def stop() -> None:
        entered.append(standing_still(engine))
        entered[0].__enter__()

    try:
        yield stop
    finally:
        for one in entered:
            one.__exit__(None, None, None)


def test_w12_an_engine_that_is_gone_costs_the_others_nothing(two: list[RunningEngine], transport: str) -> None:
    gone = EngineInfo("engine-gone", "http://127.0.0.1:9", "key", 1)
    model = other_model(two[0], seed=33)
    failures = update(two[0], model, 4, [gone, two[1].info], transport)
    assert list(failures) == ["engine-gone"]
    for engine in two:
        assert_is(engine, model, 4)


def test_w2_an_engine_of_another_size_than_the_plan_is_set_aside_by_name(two: list[RunningEngine]) -> None:
    larger = EngineInfo("engine-larger", two[1].info.url, two[1].info.admin_key, 2)
    plan = Plan(two[0])
    with open_update([two[0].info, larger]) as (fleet, carrier):
        carrier.check(plan.tensors, plan.placements)
        assert fleet.failures == {"engine-larger": "engine-larger has 2 ranks, the plan is for 1"}


def test_w3_over_every_transport_wrong_names_and_dtypes_and_missing_tensors_are_named(
    two: list[RunningEngine], transport: str
) -> None:
    plan, model = Plan(two[0]), other_model(two[0], seed=34)
    first = next(iter(plan.buckets(model)))
    name, tensor = first[0]

    def send_and_wait(carrier: Any, bucket: list[Any]) -> None:
        carrier.send(bucket)
        carrier.wait()

    def send_and_verify(carrier: Any, bucket: list[Any]) -> None:
        carrier.send(bucket)
        carrier.verify(1, plan.placements, WeightProof(plan.tensors, plan.placements).granules)

    with (
        open_update([two[0].info], transport=transport) as (_fleet, carrier),
        pytest.raises(NoEngineLeft, match=r"ignored them: model\.stranger"),
    ):
        send_and_wait(carrier, [("model.stranger", tensor.clone()), *first])
    with (
        open_update([two[0].info], transport=transport) as (_fleet, carrier),
        pytest.raises(NoEngineLeft, match=rf"another dtype .*{name} \(bfloat16 into float32\)"),
    ):
        send_and_wait(carrier, [(name, tensor.bfloat16())])
    with (
        open_update([two[0].info], transport=transport) as (_fleet, carrier),
        pytest.raises(NothingSent, match="never sent"),
    ):
        send_and_verify(carrier, first)
    with open_update([two[0].info], transport=transport) as (_fleet, carrier), pytest.raises(NothingSent):
        carrier.send([])


def test_a_torn_file_is_an_error_by_name_and_leaves_no_file(two: list[RunningEngine], tmp_path: Path) -> None:
    """Fault: a bucket's file loses its second half between the writer and the reader."""
    plan, model = Plan(two[0]), other_model(two[0], seed=35)
    with open_update([two[0].info], transport="disk", directory=tmp_path / "sync") as (_fleet, carrier):
        intact = carrier._stage

        def torn(number: int, bucket: Any) -> Any:
            staged = intact(number, bucket)
            path = carrier._path(number)
            os.truncate(path, path.stat().st_size // 2)
            return staged

        carrier._stage = torn
        with pytest.raises(NoEngineLeft, match=r"BucketError: .*bucket-00000\.safetensors cannot be read"):
            load_all(carrier, plan, model)
    assert not list((tmp_path / "sync").iterdir())


def test_a_directory_that_the_engine_does_not_see_is_named(two: list[RunningEngine], tmp_path: Path) -> None:
    """Fault: the file is gone, as on a machine that does not share the directory."""
    plan, model = Plan(two[0]), other_model(two[0], seed=36)
    with open_update([two[0].info], transport="disk", directory=tmp_path / "sync") as (_fleet, carrier):
        intact = carrier._stage

        def elsewhere(number: int, bucket: Any) -> Any:
            source, entries = intact(number, bucket)
            return lambda: {**source(), "path": "/not/shared/bucket-00000.safetensors"}, entries

        carrier._stage = elsewhere
        with pytest.raises(NoEngineLeft, match="must be on a file system that the engines share"):
            load_all(carrier, plan, model)


def test_a_disk_that_takes_no_more_is_an_error_that_says_how_much_was_wanted(
    two: list[RunningEngine], tmp_path: Path
) -> None:
    """Fault: the kernel refuses to let files grow beyond 64 KiB."""
    plan, model = Plan(two[0]), other_model(two[0], seed=37)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open_update([two[0].info], transport="disk", directory=tmp_path / "sync") as (_fleet, carrier):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            with pytest.raises(BucketNotWritten, match=r"a bucket of \d+ bytes cannot be written"):
                send_all(carrier, plan, model, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
    assert not list((tmp_path / "sync").iterdir())


def test_files_are_there_only_while_engines_load_them(two: list[RunningEngine], tmp_path: Path) -> None:
    """Also those of an update that was killed."""
    left_over = tmp_path / "sync" / "killed" / "bucket-00000.safetensors"
    left_over.parent.mkdir(parents=True)
    left_over.write_bytes(b"half")
    plan, model = Plan(two[0]), other_model(two[0], seed=38)
    with open_update([two[0].info], transport="disk", directory=tmp_path / "sync") as (_fleet, carrier):
        assert not left_over.exists()
        most = 0
        for bucket in plan.buckets(model):
            carrier.send(bucket)
            most = max(most, len(list(carrier.directory.iterdir())))
        assert most == 2
        carrier.wait()
        assert not list(carrier.directory.iterdir())
    assert not list((tmp_path / "sync").iterdir())


def test_ipc_refuses_an_engine_on_another_machine_and_says_what_to_set() -> None:
    far = EngineInfo("engine-far", "http://192.0.2.1:1", "key", 1)
    with (
        EngineFleet([far], TIMEOUT_S) as fleet,
        open_carrier("ipc", fleet, TIMEOUT_S) as carrier,
        pytest.raises(NoEngineLeft, match=r"engine-far runs on 192\.0\.2\.1, .* set sync\.transport to broadcast"),
    ):
        carrier.describe()


def test_w12_an_engine_that_dies_amid_a_broadcast_is_set_aside_and_the_bucket_sent_again(
    two: list[RunningEngine],
) -> None:
    """Fault: SIGKILL of an engine between two buckets. Stands last: the engine is gone afterwards."""
    steady, victim = two
    plan, model = Plan(steady), other_model(steady, seed=39)

    def kill() -> None:
        for process in processes(victim):
            process.kill()

    with EngineFleet([victim.info, steady.info], TIMEOUT_S) as fleet:
        fleet.pause()
        fleet.begin_weight_update()
        began = time.monotonic()
        with open_carrier("broadcast", fleet, TIMEOUT_S) as carrier:
            proof = send_all(carrier, plan, model, {2: kill})
            assert carrier.prove(5, plan.placements, proof) == [steady.info.engine_id]
        assert time.monotonic() - began < TIMEOUT_S, "a closed connection is noticed at once"
        assert list(fleet.failures) == [victim.info.engine_id]
        fleet.end_weight_update(5)
        fleet.flush_cache()
        fleet.continue_generation()
    assert_is(steady, model, 5)
