"""Every family, every transport, engines of one and two ranks: after an update from another model's weights the real
engine computes what transformers computes."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_fixtures import Engines, RunningEngine
from reference import greedy_choices, largest_difference, logprobs_of
from safetensors.torch import load_file, save_file
from shard_trainers import Trainers
from tiny_models import make_tiny_model
from weights import TRANSPORTS, Plan, open_update, update

from slimerl.engine.protocol import SamplingParams
from slimerl.resharding.layouts import MegatronLayout
from slimerl.resharding.proof import WeightProof
from slimerl.resharding.sent_state import SentState
from slimerl.samples.messages import ReleaseRequest

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
