"""On a real SLURM what dies on some node is started again within the job, as `slimerl run` does on one machine."""

import pytest
from slurm_jobs import processes_naming, submit, tiny_spec

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_engines_and_rollout_processes_are_started_again_in_place_and_a_stop_saves_and_ends_the_job(cluster, tmp_path):
    """Injected, one after the other: an engine that is killed, a rollout process that is, an engine that is stopped.
    A plain job of two nodes: on each a trainer rank, an engine, and the rollout process that has this engine."""
    spec = tiny_spec(
        tmp_path,
        {"placement": "colocated", "gpus_per_node": 1, "network": "hostname"},
        training={"steps": 10_000, "prompts_per_step": 4},
        rollout={"samples_per_prompt": 4, "max_new_tokens": 6, "processes": 2},
        engine={"replicas": 2},
        checkpoint={"every_steps": 1000},
        deadlines={"alive_s": 20.0},
    )
    job = submit(cluster, spec)
    job.until_steps(1)
    job.role("slimerl.engine", "--index", "1").kill()
    job.until_said("engine-1 was killed by SIGKILL (node2: task 0: Killed); started again (1 of 3)")
    job.until_engines(2)
    job.role("slimerl.rollout", "--process", "1").kill()
    job.until_said("rollout-1 was killed by SIGKILL (node2: task 0: Killed); started again in place, from its journal")
    job.until_steps(job.steps()[-1] + 2)
    stopped = job.role("slimerl.engine", "--index", "0")
    stopped.suspend()
    job.until_said(f"engine-0 stood still: engine-0 (process {stopped.pid}) gave no sign of life in 'event loop'")
    assert "in run_forever" in (job.run_dir / "logs/engine-0.log").read_text(), "its stacks"
    job.until_engines(2)
    job.stop()
    job.until("COMPLETED")
    steps = job.steps()
    assert steps == list(range(1, len(steps) + 1))
    assert job.saved() == steps[-1:]
    assert job.resumed_from() == [], "the trainer went on all the time"
    assert job.field("Restarts") == "0"
    assert processes_naming(tmp_path) == []


def test_where_the_trainer_dies_the_run_goes_on_from_its_newest_checkpoint_within_the_job(cluster, tmp_path):
    """Injected: a rank that is killed on the second of the trainer's nodes. A heterogeneous job."""
    steps = 12
    spec = tiny_spec(
        tmp_path,
        {"placement": "disaggregated", "gpus_per_node": 1, "network": "hostname"},
        training={"steps": steps, "prompts_per_step": 4},
        checkpoint={"every_steps": 2},
    )
    job = submit(cluster, spec)
    job.until_saved(2)
    job.rank(1).kill()
    said = job.until_said("trainer ")
    job.until("COMPLETED")
    (resumed,) = job.resumed_from()
    assert said.endswith(f"(node2: task 1: Exited with exit code 1); the run goes on after step {resumed} (1 of 3)")
    assert job.steps() == list(range(1, steps + 1))
    assert (job.run_dir / "model/config.json").exists()
    assert job.field("Restarts") == "0"
    assert processes_naming(tmp_path) == []
