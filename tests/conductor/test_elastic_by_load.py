"""Engines by load in a run: the record's steps bring and remove engines as commands do, within the same bounds."""

import json
import os
import sys
import time

import pytest
from tiny_run import write_spec
from typer.testing import CliRunner

from slimerl.cli import app
from slimerl.conductor import elastic
from slimerl.conductor.elastic import ElasticEngines, EngineRequest, engine_ids
from slimerl.conductor.elastic_by_load import EnginesByLoad
from slimerl.conductor.preflight import machine
from slimerl.conductor.roles import RoleCommand, Roles
from slimerl.conductor.supervise import RoleProcess, end_all
from slimerl.spec import load_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.report import final_table
from slimerl.telemetry.run_log import RESIZED

SLEEP = "import time; time.sleep(60)"
WAITING, IDLE = {"wait": 0.6, "idle": 0.1}, {"wait": 0.05, "idle": 0.95}


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory):
    return write_spec(
        tmp_path_factory.mktemp("elastic"),
        training={"steps": 50},
        deadlines={"shutdown_s": 2.0},
        cluster={"placement": "disaggregated"},
    )


class Conducted:
    """The conductor's part in a run of so many engines, whose roles sleep. `said`: to the user."""

    def __init__(self, spec_file, directory, replicas, *overrides):
        self.said = []
        self.spec = load_spec(spec_file, [f"output_dir={directory}", f"engine.replicas={replicas}", *overrides])
        (self.spec.run_dir / "logs").mkdir(parents=True)
        self.roles = [self._sleeper(f"engine-{number}", f"engine-{number}") for number in range(replicas)]
        self.roles.append(self._sleeper("trainer", None))
        self.engines = ElasticEngines(Roles(self.spec, spec_file), self.said.append)
        self.by_load = EnginesByLoad(self.spec, self.engines, self.said.append)
        self.step = 0

    def _sleeper(self, name, engine):
        command = RoleCommand(name, [sys.executable, "-c", SLEEP], dict(os.environ), engine_id=engine)
        return RoleProcess(command, self.spec.run_dir / "logs")

    def record(self, wait, idle, serving=None, at=None):
        """A line of the metrics, of the next step."""
        self.step += 1
        engines = len(engine_ids(self.roles)) if serving is None else serving
        shares = {"time/wait": 2 * wait, "rollout/engine_idle_share": idle, "rollout/engines": float(engines)}
        return json.dumps({"step": self.step, "time": at or time.time(), "time/step": 2.0, **shares}) + "\n"

    def steps(self, count, **shares):
        """So many more go by."""
        for _ in range(count):
            with (self.spec.run_dir / "metrics.jsonl").open("a") as file:
                file.write(self.record(**shares))
            self.by_load.look(self.roles)

    def notes(self):
        return [each["text"] for each in read_records(self.spec.run_dir / "events.jsonl") if each["name"] == RESIZED]


@pytest.fixture
def conducted(spec_file, tmp_path, monkeypatch):
    """Makes them. How much memory this machine has free just now is not what is tested here."""
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 64 * 2**30)
    made = []

    def conduct(replicas, *overrides):
        made.append(Conducted(spec_file, tmp_path / "run", replicas, *overrides))
        return made[-1]

    yield conduct
    for one in made:
        end_all(one.roles, 0.1)


BOUNDS = ("engine.elastic.max=3", "engine.elastic.cooldown_steps=2")


def test_a_trainer_that_waits_gets_an_engine_and_both_is_said_and_recorded(conducted):
    run = conducted(1, *BOUNDS)
    run.steps(2, **WAITING)
    assert engine_ids(run.roles) == ["engine-0"], "one whole step is not enough"
    run.steps(1, **WAITING)
    assert [role.role.name for role in run.roles] == ["engine-0", "engine-1", "trainer"]
    assert run.said == run.notes()
    assert run.said == [
        "engine-1 is added (the trainer waited 60% of its time for samples, engines were idle for 10% of theirs); "
        "it serves after a weight sync"
    ]
    columns = final_table(run.spec.run_dir, "elastic").columns
    assert ("engines added or removed", "", "1") in list(zip(*(column.cells for column in columns), strict=True))


def test_until_it_serves_no_other_is_added(conducted):
    run = conducted(1, *BOUNDS)
    run.steps(3, **WAITING)
    run.steps(9, **WAITING, serving=1)
    assert engine_ids(run.roles) == ["engine-0", "engine-1"]


def test_the_newest_of_idle_engines_ends_and_the_others_stay(conducted):
    run = conducted(3, *BOUNDS)
    newest = run.roles[2]
    run.steps(3, **IDLE)
    assert [role.role.name for role in run.roles] == ["engine-0", "engine-1", "trainer"]
    assert newest.exit_code is not None
    assert run.said == run.notes()
    assert run.said[0].startswith("engine-2 is removed (the trainer waited 5% of its time for samples, engines were ")


def test_steps_of_an_earlier_start_say_nothing_of_this_one(conducted):
    """The trainer goes on from a checkpoint: the record is a new file, with the steps up to there."""
    run = conducted(1, *BOUNDS)
    run.steps(1, **WAITING)
    part = run.spec.run_dir / "metrics.part"
    part.write_text("".join(run.record(**WAITING, at=time.time() - 60) for _ in range(9)))
    part.replace(run.spec.run_dir / "metrics.jsonl")
    run.by_load.look(run.roles)
    assert engine_ids(run.roles) == ["engine-0"]


def test_metrics_of_something_else_than_a_step_are_passed_over(conducted):
    run = conducted(1, *BOUNDS)
    (run.spec.run_dir / "metrics.jsonl").write_text(json.dumps({"step": 0, "time": time.time(), "eval/a": 1.0}) + "\n")
    run.steps(3, **WAITING)
    assert engine_ids(run.roles) == ["engine-0", "engine-1"]


def test_a_run_without_bounds_keeps_its_engines(conducted):
    run = conducted(2)
    run.steps(20, **WAITING)
    run.steps(20, **IDLE)
    assert (engine_ids(run.roles), run.said) == (["engine-0", "engine-1"], [])


def test_what_stands_in_the_way_is_said_once(conducted):
    run = conducted(3, *BOUNDS)
    run.steps(20, **WAITING)
    assert run.said == ["the trainer waits for samples, and engine.elastic.max = 3 engines run"]
    assert run.notes() == []


def test_an_engine_that_the_memory_does_not_hold_is_refused_and_that_is_said_once(conducted, monkeypatch):
    run = conducted(1, *BOUNDS)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 2**20)
    run.steps(20, **WAITING)
    assert engine_ids(run.roles) == ["engine-0"]
    [said] = run.said
    assert "no engine is added: 1 more would need about" in said


def test_commands_keep_to_the_bounds(conducted):
    run = conducted(2, "engine.elastic.min=2", "engine.elastic.max=3")
    for request, after in ((EngineRequest(add=2), 4), (EngineRequest(remove=["engine-0"]), 1)):
        refused = run.engines.change(request, run.roles, "by command").refused
        assert refused == (
            f"that would be {after} engines, and engine.elastic keeps 2 to 3; start the run with other bounds"
        )
    assert engine_ids(run.roles) == ["engine-0", "engine-1"]


def test_a_number_that_came_free_is_given_again(conducted):
    """It is an engine's place among the GPUs, of which there are no more than the bounds say."""
    run = conducted(2, *BOUNDS)
    assert run.engines.change(EngineRequest(remove=["engine-0"]), run.roles, "by command").engines == ["engine-0"]
    assert run.engines.change(EngineRequest(add=2), run.roles, "by command").engines == ["engine-0", "engine-2"]
    assert engine_ids(run.roles) == ["engine-1", "engine-0", "engine-2"]
    assert run.notes() == run.said
    assert run.said[0] == "engine-0 is removed (by command); its requests go on elsewhere"


@pytest.mark.parametrize(
    ("overrides", "add", "refused"),
    [
        (["cluster.placement=colocated"], 1, "engines take turns with the trainer on the same GPUs"),
        ([], 1, "this run has GPUs for 2 engines; raise engine.replicas, or set engine.elastic.max"),
        (BOUNDS, 1, ""),
        (BOUNDS, 2, "that would be 4 engines"),
    ],
)
def test_on_gpus_engines_are_added_where_the_run_has_some_for_them(conducted, monkeypatch, overrides, add, refused):
    """Injected: a machine with CUDA."""
    run = conducted(2, *overrides)
    monkeypatch.setattr(elastic, "has_cuda", lambda: True)
    answer = run.engines.change(EngineRequest(add=add), run.roles, "by command")
    assert answer.refused.startswith(refused)
    assert answer.engines == ([] if refused else ["engine-2"])


def test_roles_that_are_started_one_by_one_have_nobody_who_adds_engines(spec_file, tmp_path):
    result = CliRunner().invoke(app, ["prepare", str(spec_file), f"output_dir={tmp_path / 'run'}", *BOUNDS])
    assert result.exit_code == 2
    assert "engine.elastic: `slimerl run` adds and removes engines" in result.stderr
    assert not (tmp_path / "run").exists()
