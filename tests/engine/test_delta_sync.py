"""Deltas into running engines: after five of them, and after all that goes wrong with one, an engine holds what a whole
update would have given it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers
from engine_fixtures import Engines, RunningEngine
from reference import largest_difference, logprobs_of
from safetensors.torch import load_file, save_file
from test_transport_faults import processes
from tiny_models import make_tiny_model
from weights import BUCKET_BYTES, TIMEOUT_S, Plan, update

from slimerl.engine.fleet import EngineFleet, NoEngineLeft
from slimerl.engine.inside.delta import units
from slimerl.engine.protocol import SamplingParams, written_body
from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.proof import WeightProof
from slimerl.resharding.sent_state import SentState
from slimerl.resharding.transports.carrier import NothingSent
from slimerl.resharding.transports.delta import DeltaCarrier
from slimerl.resharding.transports.message import ReportDesk
from slimerl.resilience.deadline import Deadline

PROMPT = [10, 20, 30, 40, 50]
KEYS_OF_AN_IDLE_STORE = 0
ENGINES = {
    "dense, TP1": ("qwen3", False, 1),
    "dense, TP2": ("llama", True, 2),
    "experts, TP1": ("qwen3_moe", False, 1),
    "experts, TP2": ("qwen3_moe", False, 2),
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, engines: Engines) -> Iterator[RunningEngine]:
    family, tied, size = ENGINES[request.param]
    if family == "qwen3_moe":
        with engines.brief((family, size)) as [brief]:
            yield brief
    else:
        yield engines(family, tied=tied, tensor_parallel=size)


@pytest.fixture(scope="module")
def two(engines: Engines) -> Iterator[list[RunningEngine]]:
    """The session's engine, and one that tests may harm."""
    with engines.brief(("qwen3", 1)) as [victim]:
        yield [engines("qwen3"), victim]


@pytest.fixture(scope="module")
def engine_of_two_ranks(engines: Engines) -> RunningEngine:
    return engines("llama", tied=True, tensor_parallel=2)


class Sender:
    """What stays of a trainer from sync to sync."""

    def __init__(self, engine: RunningEngine, directory: Path, seed: int) -> None:
        config = transformers.AutoConfig.from_pretrained(engine.model_path)
        self.plan, self.state = Plan(engine), SentState()
        family, tied = config.model_type, config.tie_word_embeddings
        self._checkpoint = make_tiny_model(family, directory / f"seed-{seed}", seed=seed, tied=tied)
        self._weights = load_file(self._checkpoint / "model.safetensors")
        self.version = 100 * seed
        self._random = np.random.default_rng(seed)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """So that `update` takes it for a model."""
        return self._weights

    def step(self, share: float = 0.01) -> None:
        """Some elements of every parameter move to a neighbouring number, as in a step of an optimizer."""
        for tensor in self._weights.values():
            flat = units(tensor)
            moved = (self._random.random(len(flat)) < share) & (flat != 0)  # the number before zero is a NaN
            flat[moved] += self._random.choice([1, -1], int(moved.sum())).astype(flat.dtype)

    @contextmanager
    def open(self, engines: Sequence[RunningEngine], transfer_s: float = TIMEOUT_S) -> Iterator[DeltaCarrier]:
        """Paused, in a session, checked; afterwards going on, whatever happened."""
        self.version += 1
        with EngineFleet([engine.info for engine in engines], TIMEOUT_S) as fleet:
            fleet.pause()
            fleet.begin_weight_update()
            try:
                transfer = Deadline("the transfer", transfer_s)
                with DeltaCarrier(fleet, self.state, self.plan.placements, TIMEOUT_S, transfer) as carrier:
                    carrier.check(self.plan.tensors, self.plan.placements)
                    yield carrier
            finally:
                if fleet.left:
                    fleet.end_weight_update(self.version)
                    fleet.flush_cache()
                    fleet.continue_generation()

    def buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        return self.plan.buckets(self, BUCKET_BYTES)

    def send(self, carrier: DeltaCarrier, before_bucket: Mapping[int, Callable[[], None]] | None = None) -> WeightProof:
        proof = WeightProof(self.plan.tensors, self.plan.placements)
        for number, bucket in enumerate(self.buckets()):
            (before_bucket or {}).get(number, lambda: None)()
            carrier.send(bucket)
            for name, tensor in bucket:
                proof.add(name, tensor)
        return proof

    def sync(self, *engines: RunningEngine) -> DeltaCarrier:
        """A whole sync, after which all engines are proven; returns the carrier, closed."""
        with self.open(engines) as carrier:
            proof = self.send(carrier)
            assert carrier.prove(self.version, self.plan.placements, proof) == [one.info.engine_id for one in engines]
            assert carrier.desk._store is not None
            assert carrier.desk._store.num_keys() == KEYS_OF_AN_IDLE_STORE, "patches stay there until they are read"
        return carrier

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.plan.tensors)

    def assert_is(self, engine: RunningEngine) -> None:
        save_file(self._weights, self._checkpoint / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(self._checkpoint, dtype=torch.float32).eval()
        result = engine.ask(lambda client: client.generate(PROMPT, SamplingParams(16, temperature=0.0)))
        assert largest_difference(logprobs_of(model, PROMPT, result.tokens), result.logprobs) < 1e-4
        assert set(result.versions) == {self.version}


def checksums(engine: RunningEngine) -> list[dict[str, str]]:
    return [rank["checksums"] for rank in engine.ask(lambda client: client.weights_checksum())]


def test_p6_five_deltas_are_a_whole_update_bit_for_bit(engine: RunningEngine, tmp_path: Path) -> None:
    """SGLang's own checksums are the witness; the whole update goes through the model's `load_weights`."""
    sender = Sender(engine, tmp_path, seed=3)
    assert sender.sync(engine).wire_bytes > sender.nbytes
    before = checksums(engine)
    for _ in range(5):
        sender.step()
        assert sender.sync(engine).wire_bytes < sender.nbytes / 30
    sender.assert_is(engine)
    after = checksums(engine)
    assert update(engine, Sender(engine, tmp_path, seed=4), 1) == {}  # nothing of the deltas is left under the next one
    assert update(engine, sender, 2) == {}
    assert checksums(engine) == after
    assert after != before


def test_w2_an_engine_that_joins_gets_everything_while_the_other_gets_what_changed(
    two: list[RunningEngine], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Fault: the second engine was written to by somebody else, as one that was restarted."""
    steady, victim = two
    sender = Sender(steady, tmp_path, seed=5)
    sender.sync(steady)
    sender.step()
    changes = sender.sync(steady).wire_bytes
    sender.step()
    caplog.set_level(logging.WARNING)
    both = sender.sync(steady, victim)
    assert both._changing == {steady.info.engine_id}
    assert both.wire_bytes > sender.nbytes > changes
    assert update(victim, Sender(steady, tmp_path, seed=6), 1) == {}
    sender.step()
    assert sender.sync(steady, victim)._changing == {steady.info.engine_id}
    sender.step()
    assert sender.sync(steady, victim)._changing == {steady.info.engine_id, victim.info.engine_id}
    assert "rewritten" not in caplog.text, "engines are asked what they hold before changes are sent to them"
    for engine in two:
        sender.assert_is(engine)


def test_a_wrong_base_is_refused_by_the_rank_and_rewritten_in_the_same_sync(
    two: list[RunningEngine], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Fault: the sender takes an engine for one that holds its last version, though it holds another's."""
    steady, victim = two
    sender = Sender(steady, tmp_path, seed=7)
    sender.sync(steady, victim)
    assert update(victim, Sender(steady, tmp_path, seed=8), 77) == {}
    sender.step()
    with sender.open(two) as carrier, caplog.at_level(logging.WARNING):
        carrier._changing.add(victim.info.engine_id)
        proof = sender.send(carrier)
        assert carrier.prove(sender.version, sender.plan.placements, proof) == [one.info.engine_id for one in two]
        assert carrier._changing == {steady.info.engine_id}
    name, old = victim.info.engine_id, sender.version - 1
    assert f"{name} is rewritten as a whole: rank 0: patch 0: it changes version {old} (digest " in caplog.text
    assert "but here lies version 77 (digest " in caplog.text
    for engine in two:
        sender.assert_is(engine)


def test_w12_weights_that_changed_behind_the_last_proof_are_found_and_rewritten_in_the_same_sync(
    two: list[RunningEngine], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Fault: SGLang itself loads other weights from disk, of which the loader knows nothing: the base seems right."""
    steady, victim = two
    sender = Sender(steady, tmp_path, seed=9)
    sender.sync(steady, victim)
    sender.step()
    with sender.open(two) as carrier, caplog.at_level(logging.WARNING):
        assert victim.info.engine_id in carrier._changing
        body = written_body({"model_path": str(victim.model_path), "flush_cache": False})
        victim.ask(lambda client: client._call("POST", "/update_weights_from_disk", body, TIMEOUT_S))
        proof = sender.send(carrier)
        assert len(carrier.prove(sender.version, sender.plan.placements, proof)) == 2
    assert f"{victim.info.engine_id} is rewritten as a whole: " in caplog.text
    assert "rank 0 does not hold what was sent of " in caplog.text
    for engine in two:
        sender.assert_is(engine)


@pytest.fixture
def corrupt(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Bytes published under a name that begins with one put in here have one bit flipped in the middle."""
    wanted: list[str] = []
    intact = ReportDesk.publish

    def publish(self: ReportDesk, name: str, data: Any) -> str:
        if any(map(name.startswith, wanted)):
            data = bytearray(data)
            data[len(data) // 2] ^= 1
        return intact(self, name, data)

    monkeypatch.setattr(ReportDesk, "publish", publish)
    return wanted


def test_w12_a_flipped_bit_on_the_way_is_found_by_the_rank_and_nothing_of_the_patch_is_written(
    engine_of_two_ranks: RunningEngine, corrupt: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Fault: a bit of the second patch of rank 1 changes in transit; then of its rewrite as well."""
    sender = Sender(engine_of_two_ranks, tmp_path, seed=10)
    sender.sync(engine_of_two_ranks)
    corrupt.append("patch-1/changes/1/")
    sender.step()
    with caplog.at_level(logging.WARNING):
        sender.sync(engine_of_two_ranks)
    said = "rewritten as a whole: rank 1: patch 1: its bytes are not those that were sent (SHA-256)"
    assert said in caplog.text
    sender.assert_is(engine_of_two_ranks)

    corrupt[:] = ["patch-1/changes/1/", f"patch-{len(list(sender.buckets()))}/whole/1/"]
    sender.step()
    with (
        sender.open([engine_of_two_ranks]) as carrier,
        pytest.raises(NoEngineLeft, match=r"engine-\d+ rank 1: patch \d+: its bytes are not those that were sent"),
    ):
        carrier.prove(sender.version, sender.plan.placements, sender.send(carrier))
    corrupt.clear()
    assert sender.sync(engine_of_two_ranks).wire_bytes > sender.nbytes, "nothing is known of a dirty engine"
    sender.assert_is(engine_of_two_ranks)


def test_a_rewrite_for_which_no_time_is_left_sets_the_engine_aside_and_names_the_key(
    two: list[RunningEngine], corrupt: list[str], tmp_path: Path
) -> None:
    steady, victim = two
    sender = Sender(steady, tmp_path, seed=11)
    sender.sync(steady)
    sender.step()
    corrupt.append("patch-2/whole/0/")
    with sender.open(two, transfer_s=0.0) as carrier:
        proof = sender.send(carrier)
        assert carrier.prove(sender.version, sender.plan.placements, proof) == [steady.info.engine_id]
        said = carrier.fleet.failures[victim.info.engine_id]
    assert "rank 0: patch 2: its bytes are not those that were sent" in said
    assert said.endswith("no time is left to rewrite it; raise deadlines.sync_s")
    corrupt.clear()
    sender.step()
    sender.sync(steady, victim)
    for engine in two:
        sender.assert_is(engine)


def test_w3_what_has_no_place_or_is_not_sent_is_an_error_naming_it(two: list[RunningEngine], tmp_path: Path) -> None:
    sender = Sender(two[0], tmp_path, seed=12)
    first = next(sender.buckets())
    with sender.open([two[0]]) as carrier, pytest.raises(CoverageError, match=r"no place for model\.stranger"):
        carrier.send([("model.stranger", torch.zeros(8)), *first])
    proof = WeightProof(sender.plan.tensors, sender.plan.placements)
    with sender.open([two[0]]) as carrier:
        carrier.send(first)
        with pytest.raises(NothingSent, match="never sent"):
            carrier.prove(sender.version, sender.plan.placements, proof)
    with sender.open([two[0]]) as carrier, pytest.raises(NothingSent):
        carrier.send([])


def test_w7_fifty_deltas_leave_memory_descriptors_and_threads_as_they_were(
    engine_of_two_ranks: RunningEngine, tmp_path: Path
) -> None:
    """On either side, after a few that may warm caches; every other one rewrites the engine as a whole."""
    sender = Sender(engine_of_two_ranks, tmp_path, seed=13)
    held = [psutil.Process(), *processes(engine_of_two_ranks)]

    def sync_often(times: int) -> None:
        for number in range(times):
            sender.step()
            if number % 2:
                sender.state.bases = None
            sender.sync(engine_of_two_ranks)

    sync_often(6)
    before = [(process.num_fds(), process.num_threads()) for process in held]
    memory = [process.memory_info().rss for process in held]
    sync_often(50)
    settled = Deadline(f"descriptors and threads to go back to {before}", 10.0)
    settled.wait_until(
        lambda: all(
            process.num_fds() <= descriptors and process.num_threads() <= threads
            for process, (descriptors, threads) in zip(held, before, strict=True)
        )
    )
    grown = [process.memory_info().rss - then for process, then in zip(held, memory, strict=True)]
    # Patches of a whole rewrite that stayed in the store, or in an engine, would be 50 MiB.
    assert max(grown) < 10 * 2**20, grown


def test_w12_an_engine_that_dies_amid_a_delta_is_set_aside_and_the_other_is_served(
    two: list[RunningEngine], engines: Engines, tmp_path: Path
) -> None:
    """Fault: SIGKILL between two buckets. Stands last: the engine is gone afterwards; a new one takes its place."""
    steady, victim = two
    sender = Sender(steady, tmp_path, seed=14)
    sender.sync(steady, victim)
    sender.step()

    def kill() -> None:
        for process in processes(victim):
            process.kill()

    with sender.open([victim, steady]) as carrier:
        proof = sender.send(carrier, {2: kill})
        assert carrier.prove(sender.version, sender.plan.placements, proof) == [steady.info.engine_id]
        assert list(carrier.fleet.failures) == [victim.info.engine_id]
    sender.assert_is(steady)
    with engines.brief(("qwen3", 1)) as [restarted]:
        sender.step()
        assert sender.sync(steady, restarted)._changing == {steady.info.engine_id}
        for engine in (steady, restarted):
            sender.assert_is(engine)
