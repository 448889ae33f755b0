"""The trainer role, started from a converted checkpoint by `model.megatron_path`."""

import json
import os
import subprocess
import sys

import torch
import yaml
from converted_models import all_tensors
from tiny_models import make_tiny_model

from slimerl.conversion.convert import convert

ROWS = [{"id": str(i), "prompt": f"{i}+1=", "response": str(i + 1)} for i in range(4)]


def test_a_run_takes_its_weights_from_megatron_path_and_the_rest_from_model_path(tmp_path):
    """The learning rate is too small to change a float32, so that the export is what the run started from."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    make_tiny_model("qwen3", tmp_path / "model", seed=0, **sizes)
    make_tiny_model("qwen3", tmp_path / "other", seed=1, **sizes)
    convert(tmp_path / "other", tmp_path / "megatron")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = {
        "name": "sft",
        "output_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "model"), "megatron_path": str(tmp_path / "megatron")},
        "data": {"train_path": str(rows)},
        "algorithm": {"name": "sft"},
        "training": {"steps": 1, "prompts_per_step": 4, "optimizer": {"lr": 1e-30}, "parallel": {"tensor": 2}},
        "checkpoint": {"every_steps": 0},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "slimerl.training", str(tmp_path / "spec.yaml")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    exported, wanted = all_tensors(tmp_path / "run" / "model"), all_tensors(tmp_path / "other")
    assert exported.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(exported[name], wanted[name])] == []
    assert not torch.equal(wanted["model.norm.weight"], all_tensors(tmp_path / "model")["model.norm.weight"])
