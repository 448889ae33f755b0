"""The launch scripts take every size from the spec. SLURM's commands are stood in for by a few lines of shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_models import make_tiny_model

from slimerl.spec import load_spec

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"

SRUN = r"""#!/bin/bash
# Runs a task on this machine, as the only one.
while [[ $1 == --* ]]; do [[ $1 == --output=* ]] && exec >>"${1#--output=}" 2>&1; shift; done
SLURM_PROCID=0 exec "$@"
"""
SCONTROL = r"""#!/bin/bash
case $1 in
show) IFS=,; printf '%s\n' $3 ;;
requeue) echo "$2" >>"$REQUEUED" ;;
esac
"""
SCANCEL = r"""#!/bin/bash
"""
SBATCH = r"""#!/bin/bash
printf '%s\n' "$@"
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """SLURM's commands, in front of the path."""
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "sbatch": SBATCH}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("REQUEUED", str(tmp_path / "requeued"))
    return tmp_path


def bash(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_shellcheck_has_nothing_to_say():
    scripts = [*LAUNCH.glob("*.sh"), *(LAUNCH / "slurm").iterdir(), ROOT / ".ci/run"]
    assert {script.name for script in scripts} >= {"quickstart.sh", "test.sh", "submit.sh", "run.sbatch", "run"}
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, *scripts], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_engines_of_their_own_are_a_second_component_of_the_job(stand_ins):
    run_dir = stand_ins / "run"
    done = bash(LAUNCH / "slurm/submit.sh", "configs/deepseek_v3_671b.yaml", f"output_dir={run_dir}", "--", "-p", "gpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    first, second = lines[: lines.index(":")], lines[lines.index(":") + 1 :]
    assert {"--nodes=32", "--gpus-per-node=8", "-p", "gpu"} <= set(first)
    assert {"--nodes=64", "--gpus-per-node=8", "-p", "gpu"} <= set(second)
    assert second[-2:] == [str(ROOT), str(run_dir / "spec.yaml")]
    assert load_spec(run_dir / "spec.yaml").engine_nodes == 64


def test_a_percent_sign_in_the_run_directory_is_no_placeholder_of_slurm(stand_ins):
    run_dir = stand_ins / "run-50%u"
    done = bash(LAUNCH / "slurm/submit.sh", "configs/deepseek_v3_671b.yaml", f"output_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    assert f"--output={stand_ins}/run-50%%u/slurm-%j.out" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == str(run_dir / "spec.yaml")


def test_what_is_submitted_is_frozen_and_a_run_that_was_is_replaced_when_told_so(stand_ins):
    run_dir = stand_ins / "run"
    submit = [LAUNCH / "slurm/submit.sh", "configs/deepseek_v3_671b.yaml", f"output_dir={run_dir}"]
    assert bash(*submit).returncode == 0
    assert bash(*submit, "training.steps=7").returncode == 0, "nothing has begun yet"
    assert load_spec(run_dir / "spec.yaml").training.steps == 7
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
    refused = bash(*submit, "training.steps=8")
    assert refused.returncode == 2
    assert "holds the record of an earlier run" in refused.stderr
    assert bash(*submit, "training.steps=9", "--fresh").returncode == 0
    assert not (run_dir / "metrics.jsonl").exists()
    assert load_spec(run_dir / "spec.yaml").training.steps == 9


def test_roles_on_several_nodes_that_could_not_reach_each_other_are_not_submitted(stand_ins):
    run_dir = stand_ins / "run"
    wrong = ["cluster.network=loopback", "sync.transport=ipc"]
    done = bash(LAUNCH / "slurm/submit.sh", "configs/deepseek_v3_671b.yaml", f"output_dir={run_dir}", *wrong)
    assert done.returncode == 2
    assert "cluster.network = loopback: the roles of 768 GPUs on nodes of 8 could not reach each other" in done.stderr
    assert "sync.transport = ipc reaches the engines of one machine" in done.stderr
    assert not run_dir.exists()


def test_engines_that_share_the_trainers_gpus_are_in_a_plain_job(stand_ins):
    spec = "configs/deepseek_v3_671b_colocated.yaml"
    done = bash(LAUNCH / "slurm/submit.sh", spec, f"output_dir={stand_ins / 'run'}", WITHOUT_GPUS="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "--nodes=64" in lines
    assert ":" not in lines
    assert not any(line.startswith("--gpus") for line in lines)


def test_a_trainer_of_several_nodes_must_know_the_first_of_them():
    done = bash(LAUNCH / "torchrun_trainer.sh", "configs/qwen3_30b_a3b.yaml", MASTER_ADDR="")
    assert done.returncode == 2
    assert done.stderr.startswith("the trainer has 4 nodes: set MASTER_ADDR")


def test_ranks_that_do_not_fill_their_nodes_are_refused():
    done = bash(LAUNCH / "torchrun_trainer.sh", "configs/qwen3_30b_a3b.yaml", "cluster.gpus_per_node=5")
    assert done.returncode == 2
    assert "has 32 ranks, which do not fill 7 nodes of cluster.gpus_per_node = 5" in done.stderr


def test_a_job_that_is_asked_to_stop_is_queued_again_and_finishes_then(stand_ins):
    """Fine-tuning, without engines. The request is there from the start: the first step is the last."""
    rows = [{"id": str(number), "prompt": f"{number}+1=", "response": str(number + 1)} for number in range(8)]
    (stand_ins / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "name": "job",
        "output_dir": str(stand_ins / "run"),
        "model": {"path": str(make_tiny_model("qwen3", stand_ins / "model"))},
        "data": {"train_path": str(stand_ins / "rows.jsonl")},
        "algorithm": {"name": "sft"},
        "training": {"steps": 2, "prompts_per_step": 4, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"every_steps": 100},
    }
    spec = stand_ins / "spec.yaml"
    spec.write_text(yaml.safe_dump(tree))
    job = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": "17", "SLURM_HET_SIZE": "1", "MASTER_PORT": "29517"}
    # as the signal before the time limit would, but without a race against two short steps
    asked = stand_ins / "asked.sbatch"
    script = (LAUNCH / "slurm/run.sbatch").read_text()
    asked.write_text(script.replace("while true; do", "kill -USR1 $$\nwhile true; do", 1))
    prepared = subprocess.run(
        [sys.executable, "-m", "slimerl.cli", "prepare", spec], capture_output=True, text=True, timeout=60, check=True
    )
    frozen = prepared.stdout.strip()
    done = bash(asked, ROOT, frozen, **job)
    log = (stand_ins / "run/logs/trainer.log").read_text()
    assert done.returncode == 0, done.stderr + log
    assert (stand_ins / "requeued").read_text() == "17\n"
    assert [path.name for path in (stand_ins / "run/checkpoints").iterdir()] == ["step-1"]
    done = bash(LAUNCH / "slurm/run.sbatch", ROOT, frozen, **job, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr + (stand_ins / "run/logs/trainer.log").read_text()
    assert (stand_ins / "requeued").read_text() == "17\n"
    assert (stand_ins / "run/model/config.json").exists()
    steps = [json.loads(line)["step"] for line in (stand_ins / "run/metrics.jsonl").read_text().splitlines()]
    assert steps[-2:] == [1, 2]
