"""Runs on a real SLURM: they work across nodes, and lose nothing to a time limit, a requeue or a cancellation."""

import json
from collections.abc import Iterator

import pytest
from slurm_cluster import Cluster, NoSlurm, install
from slurm_daemons import GPUS
from slurm_jobs import processes_naming, submit, tiny_spec

from slimerl.samples.messages import read_address

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        install()
    except NoSlurm as reason:
        pytest.skip(str(reason))
    with Cluster(nodes=3) as started:
        yield started


def test_roles_on_different_nodes_save_before_the_time_limit_and_the_requeued_job_ends_the_run(cluster, tmp_path):
    """A heterogeneous job: a node for each of two trainer ranks, one for the engine. Its time limit is as long as the
    lead of the signal, so that the signal comes as soon as the controller looks; queued again, it gets more time."""
    steps = 40
    spec = tiny_spec(
        tmp_path,
        {"placement": "disaggregated", "gpus_per_node": 1, "network": "hostname"},
        training={"steps": steps, "prompts_per_step": 4},
        checkpoint={"every_steps": 1000},
    )
    cluster.wait_for_tick(before_s=12)
    job = submit(cluster, spec, "--time=10")
    job.until_steps(1)
    trainers, engines = (cluster.addresses[name] for name in ("node1", "node3"))
    assert json.loads((job.run_dir / "rollout.json").read_text())["url"].startswith(f"http://{trainers}:")
    assert f"at http://{engines}:" in (job.run_dir / "logs/engine-0.log").read_text()
    job.until("PENDING")
    (saved,) = job.saved()
    assert 1 <= saved < steps
    assert job.steps() == list(range(1, saved + 1))
    assert cluster.processes_of(job.number) == []
    job.until_started_again(minutes=60)
    job.until("COMPLETED")
    assert job.resumed_from() == [saved]
    assert job.steps() == list(range(1, steps + 1))
    assert (job.run_dir / "model/config.json").exists()
    assert processes_naming(tmp_path) == []


def test_rollout_processes_are_spread_over_the_trainers_nodes_and_each_makes_its_share(cluster, tmp_path):
    """A plain job of two nodes: on each a trainer rank, an engine, and the rollout process that has this engine."""
    spec = tiny_spec(
        tmp_path,
        {"placement": "colocated", "gpus_per_node": 1, "network": "hostname"},
        training={"steps": 4, "prompts_per_step": 4},
        rollout={"samples_per_prompt": 4, "max_new_tokens": 6, "processes": 2},
        engine={"replicas": 2},
        checkpoint={"every_steps": 2},
    )
    job = submit(cluster, spec)
    job.until_steps(1)
    for process, node in ((0, "node1"), (1, "node2")):
        url = read_address(job.run_dir, process).url
        assert url.startswith(f"http://{cluster.addresses[node]}:")
        assert f"at http://{cluster.addresses[node]}:" in (job.run_dir / f"logs/engine-{process}.log").read_text()
    job.until("COMPLETED")
    assert job.steps() == [1, 2, 3, 4]
    assert [step["rollout/engines"] for step in job.trained()] == [2, 2, 2, 2]
    made = [job.samples_made(process) for process in (0, 1)]
    assert all(made)
    assert sum(made) == 4 * 4 * 4
    assert (job.run_dir / "model/config.json").exists()
    assert processes_naming(tmp_path) == []


def test_a_cancelled_job_leaves_no_process_and_goes_on_when_it_is_submitted_again(cluster, tmp_path):
    """A plain job: trainer and engine share the GPUs of one node."""
    spec = tiny_spec(
        tmp_path,
        {"placement": "colocated", "gpus_per_node": GPUS},
        training={"steps": 1000, "prompts_per_step": 4},
        checkpoint={"every_steps": 2},
        sync={"transport": "ipc"},
    )
    job = submit(cluster, spec)
    job.until_saved(2)
    shown = [cluster.environment_of(job.number, role) for role in ("slimerl.training", "slimerl.engine.inside.serve")]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in shown] == ["0,1", "0,1"]
    job.signal()
    job.until("CANCELLED")
    assert cluster.processes_of(job.number) == []
    assert processes_naming(tmp_path) == []
    saved = max(job.saved())

    spec.write_text(spec.read_text().replace("steps: 1000", f"steps: {saved + 2}"))
    again = submit(cluster, spec)
    again.until("COMPLETED")
    assert again.resumed_from() == [saved]
    assert again.steps() == list(range(1, saved + 3))
    assert processes_naming(tmp_path) == []


def test_a_requeued_job_goes_on_at_the_saved_step(cluster, tmp_path):
    """Fine-tuning, without engines, on two nodes."""
    steps = 20
    spec = tiny_spec(
        tmp_path,
        {"gpus_per_node": 1, "network": "hostname"},
        algorithm={"name": "sft"},
        training={"steps": steps, "prompts_per_step": 4},
        checkpoint={"every_steps": 2},
    )
    job = submit(cluster, spec)
    job.until_saved(2)
    cluster.run("scontrol", "requeue", job.number)
    job.until("PENDING")
    assert cluster.processes_of(job.number) == []
    saved = max(job.saved())
    job.until("COMPLETED")
    assert job.field("Restarts") == "1"
    assert job.resumed_from() == [saved]
    assert job.steps() == list(range(1, steps + 1))
    assert processes_naming(tmp_path) == []
