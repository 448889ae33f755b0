"""tools/gpu_check.sh on a machine without a GPU, and the report that it makes of what its steps left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tools" / "gpu_check.sh"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def test_without_a_gpu_it_says_so_runs_nothing_and_exits_with_2(tmp_path: Path) -> None:
    done = check("--python", sys.executable, "--report", str(tmp_path / "report"))
    assert done.returncode == 2
    assert "There is no GPU that torch can use here, nothing was checked" in done.stderr
    assert not (tmp_path / "report").exists()


def test_help_names_the_exit_codes_and_a_wrong_argument_is_refused() -> None:
    done = check("--help")
    assert done.returncode == 0
    assert "2: there is no GPU" in done.stdout
    wrong = check("--instal")
    assert wrong.returncode == 64
    assert "unknown argument '--instal'" in wrong.stderr


TESTS = """<testsuites><testsuite name="pytest">
<testcase classname="tests.gpu.a" name="test_good" time="1.25"><properties><property name="freed GiB" value="2.5"/>
</properties></testcase>
<testcase classname="tests.gpu.a" name="test_left_out" time="0"><skipped message="needs 2 GPUs, found 1"/></testcase>
{bad}</testsuite></testsuites>"""
BAD = '<testcase classname="tests.gpu.a" name="test_bad" time="3"><failure message="1 != 2&#10;more"/></testcase>'


def report_of(directory: Path, steps: str, bad: str) -> tuple[int, dict, str]:
    (directory / "steps.tsv").write_text(steps)
    (directory / "tests.xml").write_text(TESTS.format(bad=bad))
    (directory / "figures.log").write_text("step 1.5 s\n")
    command = [sys.executable, str(ROOT / "tools" / "gpu_report.py"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads((directory / "report.json").read_text()), (directory / "report.md").read_text()


def test_a_report_has_versions_outcomes_reasons_seconds_and_figures(tmp_path: Path) -> None:
    code, report, text = report_of(tmp_path, "tests\t0\t70\ngrpo\t0\t50\n", bad="")
    assert code == 0
    assert report["passed"]
    assert report["versions"]["megatron-core"] == "0.16.1"
    assert [test["outcome"] for test in report["tests"]] == ["passed", "skipped"]
    assert "# GPU check: passed" in text
    assert "| grpo | passed | 50 |" in text
    assert "test_left_out: needs 2 GPUs, found 1" in text
    assert "| freed GiB | 2.5 |" in text
    assert "step 1.5 s" in text


@pytest.mark.parametrize(
    ("steps", "bad", "shown"),
    [
        ("tests\t1\t70\n", BAD, "test_bad: 1 != 2"),
        ("tests\t124\t280\n", "", "| tests | took too long | 280 |"),
        ("tests\t0\t70\ngrpo\t3\t9\n", "", "| grpo | failed with exit code 3 | 9 |"),
    ],
)
def test_a_failed_test_or_step_fails_the_check_and_is_named(tmp_path: Path, steps: str, bad: str, shown: str) -> None:
    code, report, text = report_of(tmp_path, steps, bad)
    assert code == 1
    assert not report["passed"]
    assert "# GPU check: FAILED" in text
    assert shown in text
