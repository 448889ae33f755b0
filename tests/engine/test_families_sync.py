"""Every family, every transport, engines of one and two ranks: after an update from another model's weights the real
engine computes what transformers computes."""

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_fixtures import Engines, RunningEngine
from rank_pool import RankPool
from reference import greedy_choices, largest_difference, logprobs_of
from routed_trainer import logprobs_with_and_without
from safetensors.torch import load_file, save_file
from shard_trainers import Trainers
from tiny_models import make_tiny_model
from weights import TRANSPORTS, Plan, open_update, update

from slimerl.engine.protocol import SamplingParams
from slimerl.engine.routed_experts import asked_from, read_routed_experts
from slimerl.resharding.layouts import MegatronLayout
from slimerl.resharding.proof import WeightProof
from slimerl.resharding.sent_state import SentState
from slimerl.resilience.deadline import Deadline
from slimerl.rollout.parts import append_generation
from slimerl.rollout.routed import with_routing
from slimerl.samples.messages import ReleaseRequest
from slimerl.samples.sample import Sample
from slimerl.training.training_sample import TrainingSample

PROMPT = [10, 20, 30, 40, 50]
TOKENS = 24
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
SIZES = (1, 2)


@pytest.fixture(params=FAMILIES, scope="module")
def pair(request: pytest.FixtureRequest, engines: Engines) -> Iterator[list[RunningEngine]]:
    """Engines of one and of two ranks."""
    with engines.brief(*((request.param, size) for size in SIZES)) as pair:
        yield pair


def family_of(pair: list[RunningEngine]) -> str:
    return transformers.AutoConfig.from_pretrained(pair[0].model_path).model_type


def reference(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def assert_is(engine: RunningEngine, model: Any, version: int) -> None:
    """What it generates has the model's logprobs (choices may differ where two tokens are as likely)."""
    result = engine.ask(lambda client: client.generate(PROMPT, SamplingParams(TOKENS, temperature=0.0)))
    assert largest_difference(logprobs_of(model, PROMPT, result.tokens), result.logprobs) < 1e-4
    assert result.tokens == greedy_choices(model, PROMPT, result.tokens)
    assert set(result.versions) == {version}


class Saved:
    """A checkpoint as `Trainers.fill` wants a model, with the names of the files."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    def state_dict(self) -> dict[str, torch.Tensor]:
        return load_file(self._checkpoint / "model.safetensors")


def sync_shards(engine: RunningEngine, staged: bool, versions: dict[int, Path]) -> None:
    """One checkpoint after the other; the second, where staged, while the engine could generate."""
    with Trainers([engine], staged, MegatronLayout()) as trainers:
        for version, checkpoint in versions.items():
            trainers.sync(version, Saved(checkpoint))
            assert trainers.desk.released[-1] == ReleaseRequest("lease", version, [engine.info.engine_id], {})


def test_w1_over_every_transport_the_engines_logprobs_become_the_new_models(
    pair: list[RunningEngine], tmp_path: Path
) -> None:
    """Each update comes from another random model; whole means that every rank's digests are those of what was sent."""
    for version, transport in enumerate((*TRANSPORTS, "delta", "shards", "shards-staged"), start=1):
        other = make_tiny_model(family_of(pair), tmp_path / transport, seed=100 + version)
        model = reference(other)
        for engine in pair:
            if transport.startswith("shards"):
                sync_shards(engine, transport.endswith("staged"), {version: other})
            else:
                assert update(engine, other, version, transport=transport) == {}
            assert_is(engine, model, version)


def test_w4_buckets_smaller_than_a_tensor_carry_fused_tensors_together(
    pair: list[RunningEngine], tmp_path: Path
) -> None:
    """Fault: a bucket bound of 64 bytes. q without k and v, or half of an expert, would never reach its place."""
    other = make_tiny_model(family_of(pair), tmp_path / "other", seed=120)
    engine = pair[1]
    plan = Plan(engine)
    buckets = list(plan.buckets(other, bucket_bytes=64))
    assert len(buckets) > len(plan.tensors) / 4
    proof = WeightProof(plan.tensors, plan.placements)
    with open_update([engine.info]) as (fleet, carrier):
        for bucket in buckets:
            carrier.send(bucket)
            for name, tensor in bucket:
                proof.add(name, tensor)
        assert carrier.prove(7, plan.placements, proof) == [engine.info.engine_id]
        fleet.end_weight_update(7)
    assert_is(engine, reference(other), 7)


def other_kv_b_proj(directory: Path) -> tuple[Path, Path, list[str]]:
    """Checkpoints from before and after a step that changes kv_b_proj alone, and the names of what changed."""
    before = make_tiny_model("deepseek_v3", directory / "before", seed=130)
    after = shutil.copytree(before, directory / "after")
    state = load_file(after / "model.safetensors")
    changed = [name for name in state if name.endswith("kv_b_proj.weight")]
    for name in changed:
        state[name] = state[name] * 1.5
    save_file(state, after / "model.safetensors", metadata={"format": "pt"})
    assert len(changed) == 2
    return before, after, changed


def test_w13_weights_derived_from_kv_b_proj_follow_it_over_delta_and_shards(
    pair: list[RunningEngine], tmp_path: Path
) -> None:
    """Fault: an update that changes kv_b_proj alone, and that no `load_weights` of the model sees."""
    if family_of(pair) != "deepseek_v3":
        pytest.skip("only latent attention has derived weights")
    before, after, _changed = other_kv_b_proj(tmp_path)
    for engine in pair:
        sent = SentState()
        for version, checkpoint in ((10, before), (11, after)):
            assert update(engine, checkpoint, version, transport="delta", state=sent) == {}
            assert_is(engine, reference(checkpoint), version)
        for version, staged in ((12, False), (14, True)):
            sync_shards(engine, staged, {version: before, version + 1: after})
            assert_is(engine, reference(after), version + 1)


def test_w13_weights_derived_from_kv_b_proj_follow_it(pair: list[RunningEngine], tmp_path: Path) -> None:
    """Fault: an update that changes kv_b_proj alone. The engine computes with copies of it, which no digest sees."""
    if family_of(pair) != "deepseek_v3":
        pytest.skip("only latent attention has derived weights")
    before, after, changed = other_kv_b_proj(tmp_path)
    state = load_file(after / "model.safetensors")
    for engine in pair:
        assert update(engine, before, 8) == {}
        assert_is(engine, reference(before), 8)
        plan = Plan(engine)
        with open_update([engine.info]) as (fleet, carrier):
            carrier._shapes |= {tensor.name: list(tensor.shape) for tensor in plan.tensors}
            carrier.send([(name, state[name]) for name in changed])
            carrier.verify(9, plan.placements, WeightProof(plan.tensors, plan.placements).granules)
            fleet.end_weight_update(9)
        assert_is(engine, reference(after), 9)


def test_m6_the_engines_experts_are_those_it_computed_with_and_bring_the_trainer_to_its_logprobs(
    pair: list[RunningEngine], ranks: RankPool, tmp_path: Path
) -> None:
    """Fault: the trainer's routers are off the engine's, so that some tokens go to other experts."""
    engine, family = sparse(pair), family_of(pair)
    other = make_tiny_model(family, tmp_path / "other", seed=140)
    assert update(engine, other, 8) == {}
    answer = engine.ask(lambda client: client.generate(PROMPT, SamplingParams(TOKENS), extra=asked_from(0)))
    tokens = np.array([*PROMPT, *answer.tokens], np.int32)
    known = read_routed_experts(answer.meta, 0, len(tokens))
    assert known is not None
    assert_chosen_by(reference(other), tokens[:-1], known.rows)
    rest = engine.ask(lambda client: client.generate(tokens.tolist(), SamplingParams(4), extra=asked_from(20)))
    after = read_routed_experts(rest.meta, 20, len(tokens) + 4)
    assert after is not None
    assert (after.rows[: len(tokens) - 21] == known.rows[20:]).all(), "a cached token has the choice that computed it"

    state = load_file(other / "model.safetensors")
    for name in [name for name in state if name.endswith("mlp.gate.weight")]:
        state[name] = state[name] + 0.02 * torch.randn(state[name].shape, generator=torch.Generator().manual_seed(1))
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    routing = np.full((len(tokens), known.rows.shape[1]), -1, np.int16)
    routing[:-1] = known.rows
    behavior = np.array(answer.logprobs, np.float32)
    marks = np.ones(len(behavior), bool)
    sample = TrainingSample("s", tokens, len(PROMPT), marks, behavior, 1.0, routing)
    found = ranks.run(1, logprobs_with_and_without, other, sample)[0]
    replayed, free = (float(np.abs(each - behavior).mean()) for each in found)
    assert replayed < free / 2, f"mean distance from the engine's logprobs: {replayed} with its experts, {free} without"


def test_m6_a_request_that_is_cut_off_tells_the_experts_of_the_tokens_that_it_has(pair: list[RunningEngine]) -> None:
    """Fault: an abort in mid-generation. What it has is appended to the sample, and goes on from there."""

    async def cut(client: Any) -> Any:
        endless = SamplingParams(max_new_tokens=1900, extra={"ignore_eos": True})
        deadline = Deadline("a request to be cut off behind some tokens", 30.0)
        while True:
            running = asyncio.create_task(client.generate(PROMPT, endless, request_id="cut", extra=asked_from(0)))
            await asyncio.wait({running}, timeout=0.3)
            while not running.done():
                await client.abort("cut")
                await asyncio.wait({running}, timeout=0.05)
            if len(running.result().tokens) > 2:
                return running.result()
            deadline.check()

    answer = sparse(pair).ask(cut)
    assert answer.finish_reason == "abort"
    sample = Sample("s", "g", "p", tuple(PROMPT))
    append_generation(sample, asyncio.run(with_routing(answer, 0, len(PROMPT))))
    assert len(sample.routing) == len(sample.tokens) - 1
    assert all(sample.routing)


def sparse(pair: list[RunningEngine]) -> RunningEngine:
    if not re.search(r"experts\.", " ".join(load_file(pair[0].model_path / "model.safetensors"))):
        pytest.skip("a dense model has no experts")
    return pair[0]


def assert_chosen_by(model: Any, tokens: np.ndarray, rows: np.ndarray) -> None:
    """The same experts, in any order, in every layer that has some."""
    layers, topk = model.config.num_hidden_layers, model.config.num_experts_per_tok
    found = rows.reshape(len(tokens), layers, topk)
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda _gate, _given, out, number=number: np.testing.assert_array_equal(
                    np.sort(found[:, number]), np.sort(out[2].numpy())
                )
            )
    with torch.no_grad():
        model(torch.from_numpy(tokens).long()[None])
