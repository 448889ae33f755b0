"""The report of `tools/gpu_check.sh`, from what its steps left in one directory.

Flows in: steps.tsv (name, exit code, seconds), tests.xml (pytest's), figures.log. Flows out: report.md, report.json.
Exit code 0 when every step succeeded and no test failed, else 1.
"""

import importlib.metadata
import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

LIBRARIES = (
    *("torch", "triton", "megatron-core", "sglang", "transformers", "numpy"),
    *("transformer-engine", "transformer-engine-torch", "apex", "flash-attn", "torch-memory-saver"),
)
TIMED_OUT = (124, 137)
"""Exit codes of `timeout`."""


def main(directory: Annotated[Path, typer.Argument(help="Where gpu_check.sh left its logs.")]) -> None:
    """Write DIRECTORY/report.md and report.json, and print the former."""
    steps, tests = read_steps(directory / "steps.tsv"), read_tests(directory / "tests.xml")
    report: dict[str, Any] = {
        "passed": bool(steps) and all(step["exit_code"] == 0 for step in steps) and not failures(tests),
        "versions": versions(),
        "steps": steps,
        "tests": tests,
    }
    figures = directory / "figures.log"
    text = as_markdown(report, figures.read_text() if figures.exists() else "")
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (directory / "report.md").write_text(text)
    print(text)
    sys.exit(0 if report["passed"] else 1)


def read_steps(path: Path) -> list[dict[str, Any]]:
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [{"name": name, "exit_code": int(code), "seconds": int(seconds)} for name, code, seconds in rows]


def read_tests(path: Path) -> list[dict[str, Any]]:
    """Empty where pytest did not come to its end."""
    if not path.exists():
        return []
    tests = []
    for case in ElementTree.parse(path).iter("testcase"):
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        tests.append(
            {
                "name": f"{case.get('classname')}::{case.get('name')}",
                "outcome": "passed" if found is None else found.tag.replace("failure", "failed"),
                "seconds": round(float(case.get("time", 0)), 2),
                "reason": "" if found is None else (found.get("message") or "").partition("\n")[0],
                "figures": {each.get("name"): each.get("value") for each in case.iter("property")},
            }
        )
    return tests


def failures(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [test for test in tests if test["outcome"] in ("failed", "error")]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "commit": _output("git", "rev-parse", "HEAD")}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            found[library] = "not installed"
    found["gpu, driver"] = _output(
        "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
    )
    return found


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"


def as_markdown(report: dict[str, Any], figures: str) -> str:
    tests = report["tests"]
    counts = Counter(test["outcome"] for test in tests)
    lines = [f"# GPU check: {'passed' if report['passed'] else 'FAILED'}", ""]
    lines += ["| step | result | seconds |", "|---|---|---|"]
    lines += [f"| {step['name']} | {_result(step['exit_code'])} | {step['seconds']} |" for step in report["steps"]]
    lines += ["", "Tests: " + (", ".join(f"{count} {what}" for what, count in counts.most_common()) or "none ran"), ""]
    for title, outcome in (("Failed", ("failed", "error")), ("Skipped", ("skipped",))):
        chosen = [test for test in tests if test["outcome"] in outcome]
        if chosen:
            lines += [f"## {title}", *(f"- {test['name']}: {test['reason']}" for test in chosen), ""]
    measured = [(test["name"], name, value) for test in tests for name, value in test["figures"].items()]
    if measured:
        lines += ["## Figures", "| figure | value | test |", "|---|---|---|"]
        lines += [f"| {name} | {value} | {test} |" for test, name, value in measured] + [""]
    if figures:
        lines += ["## The tiny run", "```", figures.rstrip(), "```", ""]
    lines += ["## Tests", "| test | result | seconds |", "|---|---|---|"]
    lines += [f"| {test['name']} | {test['outcome']} | {test['seconds']} |" for test in tests]
    lines += ["", "## Versions", *(f"- {name}: {value}" for name, value in report["versions"].items())]
    return "\n".join(lines) + "\n"


def _result(exit_code: int) -> str:
    if exit_code == 0:
        return "passed"
    return "took too long" if exit_code in TIMED_OUT else f"failed with exit code {exit_code}"


if __name__ == "__main__":
    typer.run(main)
