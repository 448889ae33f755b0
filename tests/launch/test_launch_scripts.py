"""The launch scripts take every size from the spec. SLURM's commands are stood in for by a few lines of shell."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from tiny_models import make_tiny_model

from slimerl.resilience.deadline import Deadline
from slimerl.spec import load_spec
from slimerl.training.checkpoint.local import Note, Place, write_note

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"

SRUN = r"""#!/bin/bash
# Runs a task on this machine, as the only one.
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 exec "$@"
"""
SCONTROL = r"""#!/bin/bash
case $1 in
show) IFS=,; printf '%s\n' $3 ;;
requeue) echo "$2" >>"$REQUEUED" ;;
esac
"""
SINFO = r"""#!/bin/bash
echo "$NODE_STATE"
"""
SILENT = r"""#!/bin/bash
"""
SBATCH = r"""#!/bin/bash
printf '%s\n' "$@"
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """SLURM's commands, in front of the path."""
    (tmp_path / "bin").mkdir()
    stand_ins = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SILENT, "squeue": SILENT}
    for name, text in (stand_ins | {"sinfo": SINFO, "sbatch": SBATCH}).items():
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


@pytest.mark.parametrize(
    ("state", "code", "queued"),
    [
        ("node3 is allocated*", 1, True),
        ("node3 is down", 1, True),
        ("node3 is allocated", 1, False),
        ("node3 is drained", 1, False),
        ("node3 is allocated*", 2, False),
        ("node3 is allocated*", 0, False),
    ],
)
def test_a_job_whose_run_failed_with_a_node_is_queued_again(stand_ins, state, code, queued):
    """The run itself is stood in for by its exit code."""
    run = stand_ins / ".venv/bin/slimerl"
    run.parent.mkdir(parents=True)
    run.write_text(f"#!/bin/bash\nexit {code}\n")
    run.chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_ID": "17", "NODE_STATE": f"node1 is allocated\n{state}"}
    done = bash(LAUNCH / "slurm/run.sbatch", stand_ins, stand_ins / "run/spec.yaml", **job)
    assert done.returncode == (0 if queued else code), done.stderr
    assert (stand_ins / "requeued").exists() is queued
    assert (f"the run failed, and {state}; the job is queued again" in done.stderr) is queued


@pytest.mark.parametrize(
    ("directory", "left", "fresh"),
    [
        ("run", [], True),
        ("run", ["step-4.partial"], True),
        ("run", ["step-4", "step-8.partial"], False),
        ("run", ["step-4.damaged"], False),
        ("run 1", ["step-4"], False),
        ("lr=[1e-6]*", ["step-4"], False),
        ("run", [Note("run-1", "/dev/shm/local", Place("/run", 1), 0)], True),
        ("run", ["step-4.partial", Note("run-1", "/dev/shm/local", Place("/run", 1), 3)], False),
    ],
    ids=[
        "nothing",
        "half of the first one",
        "one",
        "one that is damaged",
        "a space",
        "what could be a pattern",
        "a place for local ones",
        "a local one",
    ],
)
def test_a_job_that_is_queued_again_begins_anew_only_where_no_checkpoint_was_ever_whole(
    stand_ins, directory, left, fresh
):
    """The run itself is stood in for: it says how it was started."""
    run = stand_ins / ".venv/bin/slimerl"
    run.parent.mkdir(parents=True)
    run.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    run.chmod(0o755)
    checkpoints = stand_ins / directory / "checkpoints"
    for each in left:
        write_note(checkpoints, each) if isinstance(each, Note) else (checkpoints / each).mkdir(parents=True)
    job = {"SLURM_JOB_NODELIST": "node1", "SLURM_JOB_ID": "17", "NODE_STATE": "", "SLURM_RESTART_COUNT": "1"}
    spec = stand_ins / directory / "spec.yaml"
    done = bash(LAUNCH / "slurm/run.sbatch", stand_ins, spec, **job)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["run", "--slurm", str(spec), *(["--fresh"] if fresh else [])]


def test_the_script_of_a_job_passes_the_signal_on_until_the_run_hears_it_and_leaves_nothing(stand_ins):
    """A run that does not listen at first, and ends as one that has saved."""
    run, begun, listens = stand_ins / ".venv/bin/slimerl", stand_ins / "begun", stand_ins / "listens"
    run.parent.mkdir(parents=True)
    # a signal that is ignored from the start cannot be trapped by a shell
    run.write_text(
        f"#!{sys.executable}\nimport pathlib, signal, sys, time\npathlib.Path({str(begun)!r}).touch()\n"
        f"while not pathlib.Path({str(listens)!r}).exists(): time.sleep(0.05)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))\nwhile True: time.sleep(0.05)\n"
    )
    run.chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node1", "SLURM_JOB_ID": "17", "NODE_STATE": ""}
    command = ["bash", LAUNCH / "slurm/run.sbatch", stand_ins, stand_ins / "run/spec.yaml"]
    script = subprocess.Popen(command, env=os.environ | job, start_new_session=True)
    Deadline("the run to begin", 30).wait_until(begun.exists)
    script.send_signal(signal.SIGUSR1)
    script.send_signal(signal.SIGUSR1)
    listens.touch()
    assert script.wait(30) == 0
    assert (stand_ins / "requeued").read_text() == "17\n"
    assert [one.pid for one in psutil.process_iter() if one.is_running() and _session(one) == script.pid] == []


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


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
