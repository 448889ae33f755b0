"""A run whose samples may be stale is killed with many of them half made, and goes on: none is lost or trained twice,
what they had stays, and versions and learning rate go on where they were."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_run import start, teach_digits, write_spec

from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import RolloutState, SamplePayload, decode, unpack_array
from slimerl.telemetry import read_records
from slimerl.training.checkpoint.checkpointer import SOURCE_FILE
from slimerl.training.checkpoint.directory import complete_steps

STEPS, STALENESS = 8, 4
SAMPLES = 32
"""Of a step."""
HELPERS = Path(__file__).parent / "recorder"
"""On the path of the run: writes down every sample that the trainer fetches, and judges late."""


def begin(spec: Path, monkeypatch, part: str, fresh: bool):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("SLIMERL_TEST_RECORD", str(spec.parent / f"{part}.jsonl"))
    return start(spec, keep_record=not fresh, fresh=fresh)


def fetched(spec: Path, part: str) -> list[tuple[str, list[int]]]:
    """(sample id, tokens), as often as the trainer fetched it."""
    lines = (spec.parent / f"{part}.jsonl").read_text().splitlines()
    return [(record["id"], record["tokens"]) for record in map(json.loads, lines)]


def tokens_of(payload: SamplePayload) -> list[int]:
    return unpack_array(payload.tokens, "int32").tolist()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_c1_a_run_at_staleness_4_that_is_killed_amid_its_samples_loses_and_doubles_none(tmp_path, monkeypatch):
    """Injected: SIGKILL of the conductor, a step after a checkpoint that holds samples of several steps, finished ones
    and others that wait for their reward."""
    spec = write_spec(
        tmp_path,
        training={"steps": STEPS, "optimizer": {"lr": 1e-3, "min_lr": 1e-5, "warmup_steps": 2, "decay": "linear"}},
        rollout={"samples_per_prompt": SAMPLES // 8, "max_new_tokens": 6, "max_staleness": STALENESS},
        reward={"kind": "function", "function": "slow_digits:score", "workers": 2},
        checkpoint={"every_steps": 2, "keep_last": 1},
        cluster={"placement": "disaggregated"},
    )
    teach_digits(tmp_path / "base")
    run = begin(spec, monkeypatch, "before", fresh=True)
    run.until_step(3)
    run.process.kill()
    run.process.wait()
    Deadline("every role to be gone", 60).wait_until(lambda: not run.left_behind())

    root = run.directory / "checkpoints"
    saved = complete_steps(root)[0]
    state = decode((root / f"step-{saved}" / SOURCE_FILE).read_bytes(), RolloutState)
    assert (state.steps, state.trained, sum(state.dropped.values())) == (saved, saved * SAMPLES, 0)
    kept = [each.payload for group in state.groups for each in (*group.samples, *group.begun)]
    assert any(group.begun for group in state.groups), "some were under way"
    live = {sample_id for group in state.groups for sample_id in group.sample_ids}
    assert len(live) > SAMPLES, "of more than a step"

    code, output = begin(spec, monkeypatch, "after", fresh=False).finish()
    assert code == 0, output
    after = fetched(spec, "after")
    assert len(after) == len(dict(after)) == (STEPS - saved) * SAMPLES, "each is trained once"
    assert live <= dict(after).keys(), "none of those that were under way is lost"
    trained = {name for name, _ in fetched(spec, "before")[: saved * SAMPLES]}
    assert not trained & dict(after).keys(), "what the checkpoint has trained is not trained again"
    for payload in kept:
        tokens = tokens_of(payload)
        assert dict(after)[payload.sample_id][: len(tokens)] == tokens, "tokens once sampled stay"

    records = [record for record in read_records(run.directory / "metrics.jsonl") if "train/lr" in record]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    rates = [record["train/lr"] for record in records][2:]
    falls = [before - behind for before, behind in pairwise(rates)]
    assert falls == pytest.approx([falls[0]] * len(falls)), "the learning rate falls as if nothing had happened"
    assert falls[0] > 0
    staleness = [record["rollout/staleness_max"] for record in records]
    assert max(staleness) <= STALENESS
    assert max(staleness[saved:]) > 0, "samples of before the kill are of older versions"
    assert all(record["rollout/dropped"] == 0 for record in records)
