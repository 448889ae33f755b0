"""Roles as steps of a job: which nodes have them, what is refused, and what reaches a role. Nothing is started."""

from pathlib import Path

import pytest

from slimerl.conductor.elastic import ElasticEngines, EngineRequest
from slimerl.conductor.roles import RoleCommand
from slimerl.conductor.slurm import Component, Job, NoJob, RolesOfJob, job_faults, job_of
from slimerl.conductor.supervise import RoleProcess
from slimerl.spec import RunSpec, load_spec

CONFIGS = Path(__file__).parents[2] / "configs"


def nodes(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{number}" for number in range(count))


def roles_of(spec: RunSpec, trainers: int, engines: int) -> RolesOfJob:
    job = Job(
        Component("17", nodes("t", trainers), ("--het-group=0",)),
        Component("18", nodes("e", engines), ("--het-group=1",)),
    )
    return RolesOfJob(spec, Path("run/spec.yaml"), job)


def where(role: RoleCommand) -> str:
    (option,) = (word for word in role.command if word.startswith("--nodelist="))
    return option.removeprefix("--nodelist=")


@pytest.fixture
def deepseek() -> RunSpec:
    """32 nodes of the trainer, 16 engines of 4 nodes each."""
    return load_spec(CONFIGS / "deepseek_v3_671b.yaml", ["rollout.processes=3"])


def test_rollout_processes_take_turns_over_the_trainers_nodes_and_engines_fill_their_own(deepseek):
    roles = {role.name: role for role in roles_of(deepseek, 32, 64).all()}
    assert [where(roles[name]) for name in ("rollout", "rollout-1", "rollout-2")] == ["t0", "t1", "t2"]
    assert where(roles["engine-0"]) == "e0,e1,e2,e3"
    assert where(roles["engine-15"]) == "e60,e61,e62,e63"
    assert where(roles["trainer"]) == ",".join(nodes("t", 32))
    assert [role.job for role in roles.values()] == ["17"] * 3 + ["18"] * 16 + ["17"]
    assert [role.name for role in roles.values() if role.leads] == ["trainer"]


def test_several_engines_share_a_node_and_one_that_is_added_takes_the_place_of_its_number():
    spec = load_spec(CONFIGS / "qwen3_30b_a3b.yaml", ["engine.replicas=3", "engine.tensor_parallel=4"])
    roles = roles_of(spec, 4, 2)
    assert [where(roles.engine(index)) for index in range(4)] == ["e0", "e0", "e1", "e1"]
    assert roles.engine_places == 4


def test_each_task_of_a_role_knows_which_it_is_and_what_is_appended_reaches_the_role(deepseek):
    roles = roles_of(deepseek, 32, 64)
    engine, trainer = roles.engine(1), roles.all()[-1]
    shell = engine.command.index("bash")
    assert engine.command[shell + 2].endswith('; exec "$@" --node "$SLURM_PROCID"')
    assert engine.command[-2:] == ["--head", "e4"]
    assert trainer.command[trainer.command.index("bash") + 2].endswith('; PET_NODE_RANK=$SLURM_PROCID exec "$@"')
    options = trainer.command[trainer.command.index("torch.distributed.run") :]
    assert options[1:7] == ["--nnodes", "32", "--master-addr", "t0", "--master-port", "29500"]
    assert options[options.index("--nproc-per-node") + 1] == "8"


def test_a_job_of_one_component_has_all_roles_on_its_nodes():
    job = job_of({"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "a[1-2]"}, lambda listed: {"a[1-2]": ["a1", "a2"]}[listed])
    assert job.trainer == job.engines == Component("5", ("a1", "a2"))


def test_a_job_of_two_components_has_engines_on_the_second_which_has_a_number_of_its_own():
    environment = {
        "SLURM_JOB_ID": "5",
        "SLURM_HET_SIZE": "2",
        **{f"SLURM_JOB_ID_HET_GROUP_{group}": str(5 + group) for group in (0, 1)},
        **{f"SLURM_JOB_NODELIST_HET_GROUP_{group}": f"n{group}" for group in (0, 1)},
    }
    job = job_of(environment, lambda listed: [listed])
    assert job == Job(Component("5", ("n0",), ("--het-group=0",)), Component("6", ("n1",), ("--het-group=1",)))


def test_outside_of_a_job_it_is_said_what_is_missing():
    with pytest.raises(NoJob, match="SLURM_JOB_ID is not set: --slurm is for the script of a job"):
        job_of({})


@pytest.mark.parametrize(
    ("trainers", "engines", "fault"),
    [
        (32, 63, "engine 15 of 32 GPUs finds no node left: the job has 63 for engines"),
        (31, 64, "the trainer has 32 nodes by the spec, and 31 in the job"),
    ],
)
def test_a_job_with_too_few_nodes_is_refused(deepseek, trainers, engines, fault):
    assert list(job_faults(deepseek, roles_of(deepseek, trainers, engines).job)) == [fault]


def test_ranks_that_do_not_fill_their_nodes_are_refused():
    spec = load_spec(CONFIGS / "qwen3_30b_a3b.yaml", ["cluster.gpus_per_node=5"])
    assert "training.parallel has 32 ranks, which do not fill 7 nodes of cluster.gpus_per_node = 5" in list(
        job_faults(spec, roles_of(spec, 7, 64).job)
    )


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        (["engine.tensor_parallel=6"], "engine 1 would have GPUs 6 to 11 of a node of cluster.gpus_per_node = 8"),
        (["engine.tensor_parallel=12"], "engine.tensor_parallel = 12 does not fill nodes of cluster.gpus_per_node = 8"),
    ],
)
def test_engines_that_would_reach_beyond_the_gpus_of_their_node_are_refused_where_there_are_gpus(sizes, fault):
    spec = load_spec(CONFIGS / "qwen3_30b_a3b.yaml", ["engine.replicas=2", "engine.expert_parallel=1", *sizes])
    job = roles_of(spec, 4, 8).job
    (found,) = job_faults(spec, job, cuda=True)
    assert found.startswith(fault)
    assert list(job_faults(spec, job)) == []


def test_no_engine_is_added_that_the_job_has_no_node_for(deepseek):
    roles = roles_of(deepseek, 32, 64)
    running = [_Named(command) for command in roles.all()]
    answer = ElasticEngines(roles, print).change(EngineRequest(add=1), running, "by command")
    assert answer.refused.startswith("the job has nodes for 16 engines; submit it with more engine.replicas")


class _Named(RoleProcess):
    """A role that nobody has started."""

    def __init__(self, role: RoleCommand) -> None:
        self.role = role


@pytest.mark.parametrize(
    ("role", "heartbeat", "its"),
    [
        (RoleCommand("rollout", []), "rollout", True),
        (RoleCommand("rollout", []), "rollout-1", False),
        (RoleCommand("engine-1", []), "engine-1", True),
        (RoleCommand("engine-1", []), "engine-1@2", True),
        (RoleCommand("engine-1", []), "engine-12", False),
        (RoleCommand("trainer", [], leads=True), "trainer-31", True),
        (RoleCommand("trainer", [], leads=True), "engine-1", False),
    ],
)
def test_a_heartbeat_is_known_by_its_name(role, heartbeat, its):
    assert role.has_heartbeat(heartbeat) is its
