"""`slimerl doctor` tells what this machine can run, and every command's help shows how it is used."""

import json
import os
import resource
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from slimerl.cli import app
from slimerl.conductor import doctor

ASKED = [
    *("Python", "torch", "megatron-core", "transformers", "sglang", "SGLang starts", "CUDA", "transformer-engine"),
    *("apex", "nvidia-resiliency-ext", "torch.distributed", "torchrun", "cores", "memory", "/dev/shm", "disk"),
    *("open files", "user namespaces", "SLURM"),
]


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return doctor.examine(tmp_path_factory.mktemp("there"))


def test_s5_every_question_is_answered_once_and_each_no_has_a_meaning_and_a_fix(findings):
    assert [finding.name for finding in findings] == ASKED
    assert all(finding.found and finding.meaning and finding.fix for finding in findings if not finding.ok)


def test_s5_what_the_quickstart_needs_is_here_where_these_tests_run(findings):
    assert [finding.name for finding in findings if finding.needed and not finding.ok] == []
    assert doctor.can_run_quickstart(findings)


def said(findings):
    console = Console(width=60, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    doctor.report(findings, console)
    return console.export_text().splitlines()


def test_s5_each_finding_is_one_line_and_the_verdict_the_last(findings):
    lines = said(findings)
    assert len(lines) == len(ASKED) + 1
    assert lines[-1] == "can the quickstart run here? yes: bash launch/quickstart.sh"


def test_s5_a_missing_need_is_the_verdict_and_a_missing_extra_is_not(findings):
    """Injected: a machine without /dev/shm, then one without SLURM."""

    def without(name):
        lost = {"ok": False, "found": "none", "meaning": "what it means", "fix": "what to do"}
        return [replace(finding, **lost) if finding.name == name else finding for finding in findings]

    lines = said(without("/dev/shm"))
    assert lines[-1] == "can the quickstart run here? no: see /dev/shm"
    assert any(line.endswith("/dev/shm: none – what it means; what to do") for line in lines)
    assert not doctor.can_run_quickstart(without("/dev/shm"))
    assert doctor.can_run_quickstart(without("SLURM"))


def test_s5_too_little_room_and_too_few_files_are_noticed(tmp_path, monkeypatch):
    """Injected: a quickstart that wants more than any machine has, and a real limit of 512 open files."""
    for bound in ("QUICKSTART_MEMORY_BYTES", "QUICKSTART_SHARED_BYTES", "QUICKSTART_DISK_BYTES"):
        monkeypatch.setattr(doctor, bound, 2**60)
    assert [finding.ok for finding in doctor._room(tmp_path)] == [False, False, False]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        few = doctor._open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (few.ok, few.found) == (False, "512")


def test_s5_a_library_that_does_not_import_is_told_by_its_error():
    """Injected: a module that is not there."""
    assert doctor._trouble([sys.executable, "-c", "import nothing_of_that_name"]) == (
        "ModuleNotFoundError: No module named 'nothing_of_that_name'"
    )


def test_s5_the_findings_are_there_for_programs_too(findings):
    tree = json.loads(doctor.as_json(findings))
    assert tree["quickstart"] is True
    assert [finding["name"] for finding in tree["findings"]] == ASKED


def test_s5_the_exit_code_is_the_verdict(findings, monkeypatch):
    """Injected: findings of which one that is needed is missing."""
    monkeypatch.setattr(doctor, "examine", lambda directory: findings)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    monkeypatch.setattr(doctor, "examine", lambda directory: [replace(findings[0], ok=False), *findings[1:]])
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    assert answer.exit_code == 1
    assert json.loads(answer.stdout)["quickstart"] is False


@pytest.mark.parametrize("command", ["run", "check", "doctor", "engine", "rollout"])
def test_the_help_of_a_command_has_an_example(command):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"}).stdout
    assert f"slimerl {command}" in shown.partition("Example")[2]
