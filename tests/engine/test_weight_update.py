"""Weights into running engines through shared memory, and every way in which that must not go wrong in silence."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch
import transformers
from engine_fixtures import Engines, RunningEngine
from reference import greedy_choices, largest_difference, logprobs_of
from tiny_models import tiny_model
from weights import TRANSPORTS, Plan, open_update, update

from slimerl.engine.fleet import EngineFleet, NoEngineLeft
from slimerl.engine.inside.shared_bucket import HEADER_BYTES, SharedBucket
from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.resharding.proof import WeightProof
from slimerl.resharding.transports.carrier import NothingSent
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import EngineInfo

PROMPT = [10, 20, 30, 40, 50]
ENGINES = {"qwen3, TP1": ("qwen3", False, 1), "tied llama, TP2": ("llama", True, 2)}


@pytest.fixture(params=ENGINES, scope="module")
def engine(request: pytest.FixtureRequest, engines: Engines) -> RunningEngine:
    family, tied, size = ENGINES[request.param]
    return engines(family, tied=tied, tensor_parallel=size)


@pytest.fixture(scope="module")
def engine_of_two(engines: Engines) -> RunningEngine:
    return engines("llama", tied=True, tensor_parallel=2)


def other_model(engine: RunningEngine, seed: int) -> Any:
    """Another model of the engine's shape."""
    config = transformers.AutoConfig.from_pretrained(engine.model_path)
    return tiny_model(config.model_type, seed=seed, tied=config.tie_word_embeddings)


def original_model(engine: RunningEngine) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(engine.model_path).eval()


def generate(engine: RunningEngine, tokens: int = 24) -> Any:
    return engine.ask(lambda client: client.generate(PROMPT, SamplingParams(tokens, temperature=0.0)))


def assert_is(engine: RunningEngine, model: Any, version: int) -> None:
    """The engine generates what `model` would, under `version`."""
    result = generate(engine)
    assert result.tokens == greedy_choices(model, PROMPT, result.tokens)
    assert largest_difference(logprobs_of(model, PROMPT, result.tokens), result.logprobs) < 1e-4
    assert set(result.versions) == {version}


def test_an_update_moves_the_logprobs_to_those_of_the_new_model(engine: RunningEngine) -> None:
    model = other_model(engine, seed=5)
    generate(engine)  # fills the prefix cache with keys and values of the old weights
    assert update(engine, model, version=1) == {}
    assert_is(engine, model, version=1)


def test_sglangs_own_checksums_come_back_with_the_original_weights(engine: RunningEngine) -> None:
    """A second witness, which shares no code with the digest: the checksums of what SGLang itself loaded."""
    update(engine, original_model(engine), version=2)
    before = engine.ask(lambda client: client.weights_checksum())
    update(engine, other_model(engine, seed=6), version=3)
    changed = engine.ask(lambda client: client.weights_checksum())
    update(engine, original_model(engine), version=4)
    after = engine.ask(lambda client: client.weights_checksum())
    assert len(before) == engine.info.tensor_parallel
    for old, new, again in zip(before, changed, after, strict=True):
        assert old["checksums"] == again["checksums"]
        assert all(old["checksums"][name] != new["checksums"][name] for name in old["checksums"])


def test_a_running_sample_goes_on_with_the_new_weights_and_says_where_they_begin(engine: RunningEngine) -> None:
    old, new = original_model(engine), other_model(engine, seed=7)
    update(engine, old, version=5)
    result = asyncio.run(_update_in_mid_sample(engine, new, version=6))
    first_new = result.versions.index(6)
    assert result.versions == [5] * first_new + [6] * (len(result.versions) - first_new)
    assert 0 < first_new < len(result.tokens)
    expected = torch.cat(
        [
            logprobs_of(old, PROMPT, result.tokens)[:first_new],
            logprobs_of(new, PROMPT, result.tokens)[first_new:],
        ]
    )
    assert largest_difference(expected, result.logprobs) < 1e-4


async def _update_in_mid_sample(engine: RunningEngine, model: Any, version: int) -> Generation:
    """Streams: the update begins once tokens have come, and the sample ends once new weights have made some."""
    begun, enough = asyncio.Event(), asyncio.Event()
    renewed = 0

    def told(part: Generation) -> None:
        nonlocal renewed
        begun.set()
        renewed += part.versions.count(version)
        if renewed >= 8:
            enough.set()

    params = SamplingParams(max_new_tokens=1500)
    async with engine.client(60.0) as client:
        sample = asyncio.ensure_future(client.generate(PROMPT, params, request_id="mid-sample", told=told))
        await asyncio.wait_for(begun.wait(), 60.0)
        assert await asyncio.to_thread(update, engine, model, version) == {}
        await asyncio.wait_for(enough.wait(), 60.0)
        await client.abort("mid-sample")
        return await sample


@pytest.fixture
def corrupt(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(tensor, byte) pairs put in here get one bit of that byte flipped in shared memory, after the sender's copy."""
    wanted: list[tuple[str, int]] = []
    intact = SharedBucket.fill

    def fill(self: SharedBucket, tag: bytes, tensors: Any) -> Any:
        entries = intact(self, tag, tensors)
        for entry in entries:
            for name, byte in wanted:
                if entry["name"] == name:
                    self._map[HEADER_BYTES + entry["offset"] + byte] ^= 1
        return entries

    monkeypatch.setattr(SharedBucket, "fill", fill)
    return wanted


def test_w12_a_flipped_bit_is_found_on_the_rank_that_holds_it(
    engine_of_two: RunningEngine, corrupt: list[tuple[str, int]]
) -> None:
    """Fault: one bit of o_proj's last column, which lies on rank 1 alone, changes in transit."""
    name = "model.layers.1.self_attn.o_proj.weight"
    corrupt.append((name, (127) * 4))
    plan, model = Plan(engine_of_two), other_model(engine_of_two, seed=8)
    proof = WeightProof(plan.tensors, plan.placements)
    with open_update([engine_of_two.info]) as (_fleet, carrier):
        for bucket in plan.buckets(model):
            carrier.send(bucket)
            for tensor_name, tensor in bucket:
                proof.add(tensor_name, tensor)
        with pytest.raises(NoEngineLeft, match=rf"engine-\d+ rank 1 does not hold what was sent of {name}"):
            carrier.prove(9, plan.placements, proof)
    corrupt.clear()
    assert update(engine_of_two, model, version=9) == {}


def send_alone(engine: RunningEngine, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
    with open_update([engine.info]) as (_fleet, carrier):
        carrier.send(bucket)
        carrier.wait()


def test_w3_a_name_that_the_engine_does_not_know_is_an_error_naming_it(engine: RunningEngine) -> None:
    """Fault: a wrong name. SGLang answers with success and ignores the tensor."""
    wrong = "model.layers.0.self_attn.rotation.weight"
    good = next(iter(Plan(engine).buckets(original_model(engine))))
    with pytest.raises(NoEngineLeft, match=rf"does not know these tensors and ignored them: {wrong}$"):
        send_alone(engine, [(wrong, torch.zeros(8, 8)), *good])


def test_w3_a_tensor_that_nobody_sends_is_an_error_naming_it(engine: RunningEngine) -> None:
    plan = Plan(engine)
    with open_update([engine.info]) as (_fleet, carrier):
        for bucket in plan.buckets(original_model(engine)):
            rest = [(name, tensor) for name, tensor in bucket if name != "model.norm.weight"]
            carrier.send(rest)
        with pytest.raises(NothingSent, match=r"never sent: model\.norm\.weight"):
            carrier.verify(1, plan.placements, WeightProof(plan.tensors, plan.placements).granules)


def test_w3_an_empty_bucket_is_an_error(engine: RunningEngine) -> None:
    with open_update([engine.info]) as (_fleet, carrier), pytest.raises(NothingSent):
        carrier.send([])


def test_w3_a_plan_without_a_parameter_of_the_engine_is_refused_before_the_first_byte(engine: RunningEngine) -> None:
    plan = Plan(engine)
    short = [[place for place in rank if place.parameter != "model.norm.weight"] for rank in plan.placements]
    with (
        open_update([engine.info]) as (_fleet, carrier),
        pytest.raises(NoEngineLeft, match=r"rank 0: .*does not place: model\.norm\.weight"),
    ):
        carrier.check(plan.tensors, short)


def test_w2_another_dtype_than_the_engine_keeps_is_named_not_converted(engine: RunningEngine) -> None:
    first = next(iter(Plan(engine).buckets(original_model(engine))))
    with pytest.raises(NoEngineLeft, match=r"another dtype .*bfloat16 into float32"):
        send_alone(engine, [(name, tensor.bfloat16()) for name, tensor in first])


def test_an_error_inside_the_loader_names_the_tensor_and_the_server_survives(engine: RunningEngine) -> None:
    """Fault: a tensor of the wrong shape. An exception in the loader would end SGLang's scheduler."""
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(NoEngineLeft, match=rf"rank 0: LoadProblem: {name}: AssertionError"):
        send_alone(engine, [(name, torch.zeros(3, 3))])
    model = other_model(engine, seed=9)
    assert update(engine, model, version=11) == {}
    assert_is(engine, model, version=11)


def test_w6_a_bucket_is_refilled_only_after_every_rank_has_answered(engine_of_two: RunningEngine) -> None:
    """Fault: rank 1 stands still. The third bucket would overwrite the first, which it has not read."""
    plan = Plan(engine_of_two)
    ranks = [process for process in _processes(engine_of_two) if process.name().startswith("sglang::sched")]
    assert len(ranks) == 2
    buckets = list(plan.buckets(original_model(engine_of_two)))
    assert len(buckets) >= 3
    with open_update([engine_of_two.info], timeout_s=2.0) as (_fleet, carrier):
        ranks[1].send_signal(signal.SIGSTOP)
        try:
            carrier.send(buckets[0])
            carrier.send(buckets[1])
            first = bytes(carrier.memories[0]._map)
            with pytest.raises(NoEngineLeft, match=r"/update_weights_from_tensor: no answer within 2 s"):
                carrier.send(buckets[2])
            assert bytes(carrier.memories[0]._map) == first
        finally:
            ranks[1].send_signal(signal.SIGCONT)
    # It is dirty now; a whole update makes it good again.
    model = other_model(engine_of_two, seed=10)
    assert update(engine_of_two, model, version=12) == {}
    assert_is(engine_of_two, model, version=12)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_w7_fifty_updates_leave_memory_descriptors_and_threads_as_they_were(
    engine_of_two: RunningEngine, transport: str
) -> None:
    """On either side. The first updates may warm caches; what grows with each shows in the fifty after them."""
    model = original_model(engine_of_two)
    processes = [psutil.Process(), *_processes(engine_of_two)]

    def update_often(times: int) -> None:
        for version in range(times):
            assert update(engine_of_two, model, version=20 + version, transport=transport) == {}

    def held() -> list[tuple[int, int]]:
        return [(process.num_fds(), process.num_threads()) for process in processes]

    update_often(5)
    before, memory = held(), [process.memory_info().rss for process in processes]
    update_often(50)
    # The server closes its end of a connection a moment after the client did.
    settled = Deadline(f"descriptors and threads to go back to {before}", 10.0)
    settled.wait_until(
        lambda: all(now <= then for pair in zip(held(), before, strict=True) for now, then in zip(*pair, strict=True)),
        detail=lambda: f"now {held()}",
    )
    grown = [process.memory_info().rss - then for process, then in zip(processes, memory, strict=True)]
    # A leaked bucket (0.5 MiB) a time would be 25 MiB.
    assert max(grown) < 12 * 2**20, grown


def test_a_paused_engine_takes_no_core_from_the_trainer(engine_of_two: RunningEngine) -> None:
    """A rank that asked for work all the time would take one each."""

    def seconds_taken() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in _processes(engine_of_two))

    with EngineFleet([engine_of_two.info], 30.0) as fleet:
        fleet.pause()
        try:
            before = seconds_taken()
            time.sleep(2.0)  # what is measured
            taken = seconds_taken() - before
        finally:
            fleet.continue_generation()
    assert taken < 0.5


def test_w12_an_engine_that_is_gone_is_dropped_by_name_and_the_others_go_on(engine: RunningEngine) -> None:
    gone = EngineInfo("engine-gone", "http://127.0.0.1:9", "key", engine.info.tensor_parallel)
    model = other_model(engine, seed=11)
    failures = update(engine, model, version=50, others=[gone])
    assert list(failures) == ["engine-gone"]
    assert "engine-gone /pause_generation" in failures["engine-gone"]
    assert_is(engine, model, version=50)


def test_an_update_that_a_dead_coordinator_left_open_does_not_stand_in_the_way(engine: RunningEngine) -> None:
    with EngineFleet([engine.info], 30.0) as fleet:
        fleet.pause()
        fleet.begin_weight_update()
    model = other_model(engine, seed=12)
    assert update(engine, model, version=51) == {}
    assert_is(engine, model, version=51)


def test_the_memory_is_gone_with_its_sender_and_was_never_in_dev_shm(engine: RunningEngine) -> None:
    before = set(os.listdir("/dev/shm"))
    with open_update([engine.info]) as (_fleet, carrier):
        carrier.send(next(iter(Plan(engine).buckets(original_model(engine)))))
        mine = {name for name in set(os.listdir("/dev/shm")) - before if "slimerl" in name}
        address = carrier.memories[0].address
        assert os.path.exists(address["path"])
    assert not mine
    assert not os.path.exists(address["path"])


def test_describe_lists_what_each_rank_holds(engine_of_two: RunningEngine) -> None:
    with open_update([engine_of_two.info]) as (_fleet, carrier):
        [ranks] = carrier.describe().values()
    assert len(ranks) == 2
    for report in ranks:
        parameters = report["parameters"]
        fused = parameters["model.layers.0.mlp.gate_up_proj.weight"]
        assert fused == {"shape": [256, 128], "dtype": "float32", "stride": [128, 1]}
        assert "lm_head.weight" not in parameters
        assert report["gpu"] is None or isinstance(report["gpu"], str)


def _processes(engine: RunningEngine) -> list[psutil.Process]:
    root = psutil.Process(engine.server.process.pid)
    return [root, *root.children(recursive=True)]
