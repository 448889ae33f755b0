"""The trainer role as a process: it trains, exports what Hugging Face loads, and ends when told to."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tiny_models import make_tiny_model

from slimerl.resilience.deadline import Deadline
from slimerl.telemetry import read_records

ROWS = [{"id": str(i), "prompt": f"{i}+1=", "response": str(i + 1)} for i in range(24)]


def write_run(path: Path, **training) -> Path:
    make_tiny_model("qwen3", path / "model", hidden_size=64, intermediate_size=96)
    data = path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = {
        "name": "sft",
        "output_dir": str(path / "run"),
        "model": {"path": str(path / "model")},
        "data": {"train_path": str(data), "eval_path": str(data)},
        "algorithm": {"name": "sft"},
        "training": {"steps": 12, "prompts_per_step": 24, "optimizer": {"lr": 5e-3, "warmup_steps": 2}} | training,
    }
    (path / "spec.yaml").write_text(yaml.safe_dump(spec))
    return path / "spec.yaml"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def hugging_face_loss(model_path: Path) -> float:
    """Mean negative log-likelihood of the responses, by transformers alone."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    total, count = 0.0, 0
    for row in ROWS:
        prompt, response = tokenizer(row["prompt"])["input_ids"], tokenizer(row["response"])["input_ids"]
        tokens = torch.tensor([[*prompt, *response, tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        for at in range(len(prompt), tokens.shape[1]):
            total, count = total - logprobs[at - 1, tokens[0, at]].item(), count + 1
    return total / count


def test_supervised_fine_tuning_on_two_ranks_ends_with_a_better_model(tmp_path):
    spec = write_run(tmp_path, parallel={"data": 2})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "slimerl.training", str(spec)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(13))
    assert records[-1]["train/loss"] < 0.6 * records[1]["train/loss"]
    assert records[-1]["eval/loss"] < 0.6 * records[0]["eval/loss"]
    assert hugging_face_loss(tmp_path / "model") == pytest.approx(records[0]["eval/loss"], abs=1e-4)
    assert hugging_face_loss(tmp_path / "run" / "model") == pytest.approx(records[-1]["eval/loss"], abs=1e-4)


def test_a5_sigterm_ends_a_rank_that_waits_for_another_with_exit_code_143(tmp_path):
    spec = write_run(tmp_path, parallel={"data": 2})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = subprocess.Popen(
        [sys.executable, "-m", "slimerl.training", str(spec)],
        env=environment(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # rank 0 listens once it waits for rank 1, which never comes
        Deadline("rank 0 to wait for rank 1", 60).wait_until(lambda: listens(port) or rank.poll() is not None)
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(timeout=10) == 143, rank.stderr.read()[-2000:]
    finally:
        rank.kill()
        rank.communicate()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_faulty_spec_is_told_in_one_line_and_ends_with_2(tmp_path):
    spec = write_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "slimerl.training", str(spec), "training.stepz=3"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "training.steps" in done.stderr
    assert "Traceback" not in done.stderr
