"""Runs as jobs of `slurm_cluster.Cluster`, submitted as a user does it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from slurm_cluster import ROOT, Cluster
from tiny_run import write_spec

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.journal_file import read_records as read_records_of
from slimerl.rollout.journal_places import journal_of
from slimerl.samples.journal import Finished, Record
from slimerl.spec import load_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import RESTARTED

WAIT_S = 600.0
"""For a run to start, or to end: where nobody else computes it does so in a twentieth of that."""


def tiny_spec(directory: Path, cluster: dict[str, Any], **sections: dict[str, Any]) -> Path:
    """Two trainer ranks, one engine; steps of a fraction of a second."""
    defaults: dict[str, Any] = {
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 6},
        "evaluation": {"max_prompts": 2},
        "sync": {"transport": "broadcast"},
    }
    return write_spec(directory, cluster=cluster, **(defaults | sections))


@dataclass(frozen=True)
class Job:
    cluster: Cluster
    number: str
    run_dir: Path

    def field(self, name: str) -> str:
        """Of the first component."""
        shown = self.cluster.run("scontrol", "show", "job", "--oneliner", self.number).splitlines()[0]
        return dict(word.partition("=")[::2] for word in shown.split())[name]

    @property
    def state(self) -> str:
        """Whether a signal is on its way to a running job is no matter of its state."""
        return self.field("JobState").replace("SIGNALING", "RUNNING")

    def signal(self, *options: str) -> None:
        self.cluster.run("scancel", *options, self.number)

    def until(self, state: str) -> None:
        """Wait until the job is in `state`. Fails at once where it has ended in another one."""

        def there() -> bool:
            now = self.state
            assert now in (state, "PENDING", "RUNNING", "COMPLETING"), f"{now}\n{self.logs()}"
            return now == state

        Deadline(f"job {self.number} to be {state}", WAIT_S).wait_until(there, poll_s=0.5, detail=self.logs)

    def until_steps(self, count: int) -> None:
        """Wait until so many steps are recorded."""

        def there() -> bool:
            state = self.state
            assert state in ("PENDING", "RUNNING"), f"{state}\n{self.logs()}"
            return len(self.steps()) >= count

        Deadline(f"step {count} of job {self.number}", WAIT_S).wait_until(there, poll_s=0.5, detail=self.logs)

    def until_started_again(self, minutes: int) -> None:
        """Wait until a requeued job runs, with a new time limit. A controller that has nothing else to do looks at
        requeued heterogeneous jobs when something changes, and the time limit does."""

        def there() -> bool:
            self.cluster.run("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")
            return self.state == "RUNNING"

        Deadline(f"job {self.number} to start again", WAIT_S).wait_until(there, poll_s=1.0)

    def until_said(self, text: str) -> str:
        """Wait until the record notes a restart in these words, or more that begin with them; returns all."""

        def found() -> list[str]:
            said = [event for event in read_records(self.run_dir / "events.jsonl") if event.get("name") == RESTARTED]
            return [event["text"] for event in said if event["text"].startswith(text)]

        def there() -> bool:
            assert self.state == "RUNNING", self.logs()
            return bool(found())

        Deadline(f"'{text}' to be recorded", WAIT_S).wait_until(there, poll_s=0.5, detail=self.logs)
        return found()[0]

    def until_engines(self, count: int) -> None:
        """Wait until a step from now on has been sampled while so many engines served."""
        known = len(self.steps())

        def there() -> bool:
            assert self.state == "RUNNING", self.logs()
            return any(step["rollout/engines"] == count for step in self.trained()[known:])

        Deadline(f"{count} engines of job {self.number} to serve", WAIT_S).wait_until(there, 0.5, self.logs)

    def role(self, *words: str) -> psutil.Process:
        """The process on some node that was started as `python -m` and these words, beside others."""

        def is_it(command: list[str]) -> bool:
            return command[1:2] == ["-m"] and set(words) <= set(command) and command[2] == words[0]

        return next(each for each in self.cluster.processes_of(self.number) if is_it(each.cmdline()))

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank of the trainer."""
        ranks = [each for each in self.cluster.processes_of(self.number) if "slimerl.training" in each.cmdline()]
        return next(each for each in ranks if each.environ().get("RANK") == str(number))

    def stop(self) -> None:
        self.cluster.run(ROOT / ".venv/bin/slimerl", "stop", self.run_dir)

    def until_saved(self, step: int) -> None:
        checkpoint = self.run_dir / "checkpoints" / f"step-{step}"
        Deadline(str(checkpoint), WAIT_S).wait_until(checkpoint.exists, detail=self.logs)

    def steps(self) -> list[int]:
        """With a line in the record, in its order."""
        return [step["step"] for step in self.trained()]

    def trained(self) -> list[dict[str, Any]]:
        """The record of each trained step."""
        return [record for record in read_records(self.run_dir / "metrics.jsonl") if record["step"] > 0]

    def samples_made(self, process: int) -> int:
        """How many samples a rollout process finished since the start of the job."""
        journal = read_records_of(journal_of(load_spec(self.run_dir / "spec.yaml"), process), Record)
        return sum(isinstance(record, Finished) for record in journal)

    def saved(self) -> list[int]:
        """Steps with a checkpoint."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.run_dir / "checkpoints").glob("step-*"))

    def resumed_from(self) -> list[int]:
        """Steps after which the run went on, in the order of its starts."""
        events = read_records(self.run_dir / "events.jsonl")
        return [event["step"] for event in events if event.get("name") == "resumed"]

    def logs(self) -> str:
        paths = [*self.run_dir.glob("slurm-*.out"), *self.run_dir.glob("logs/*.log")]
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-1500:]}" for path in paths)


def submit(cluster: Cluster, spec: Path, *options: str) -> Job:
    """`options`: of sbatch."""
    number = cluster.run("bash", ROOT / "launch/slurm/submit.sh", spec, "--", "--parsable", *options).strip()
    return Job(cluster, number, spec.parent / "run")


def processes_naming(run_dir: Path) -> list[str]:
    """Command lines of all processes here, on whatever node, that name the run's directory."""
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=20, check=True)
    return [line for line in shown.stdout.splitlines() if str(run_dir) in line]
