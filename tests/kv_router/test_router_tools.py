"""The tools run, and print what they promise."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(tool: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    # 1: a goal was missed, as on a machine that is busy with tests it may be
    missed = "\nFAIL  " in done.stdout
    assert done.returncode == missed, done.stderr[-2000:]
    return done.stdout


def test_the_simulation_compares_makespans_and_draws_the_engines(tmp_path: Path) -> None:
    picture = tmp_path / "occupancy.svg"
    out = run(
        "simulate_rollout.py", "makespan", "--seeds", "1", "--jobs", "1", "--only", "probes", "--picture", str(picture)
    )
    assert re.search(r"KV-aware, probes first +1\.\d{3} ± 0\.000", out)
    assert picture.read_text().startswith("<svg")


def test_the_simulation_compares_training(tmp_path: Path) -> None:
    out = run(
        "simulate_rollout.py",
        "training",
        "--seeds",
        "1",
        "--steps",
        "4",
        "--groups",
        "16",
        "--jobs",
        "1",
        "--only",
        "partial",
    )
    assert re.search(r"synchronous, round robin +\d+ +1\.000", out)
    assert re.search(r"throughput bound +\d+", out)


def test_the_bench_prints_decisions_per_second() -> None:
    out = run("bench_router.py", "--speed", "--decisions", "400")
    assert len(re.findall(r"[\d,]+/s", out)) == 12
    assert re.search(
        r"\n(PASS|FAIL)  R1 4,096 ids, 90 % shared, new sessions: decisions per second: [\d,]+ >= 8,000", out
    )


def test_the_bench_over_http_measures_engines_in_another_process() -> None:
    rows = ("direct", "raw pass-through")
    out = run("bench_router_http.py", "--only", *rows, "--concurrency", "64", "--time-scale", "0.001")
    rates = {name: float(hit) for name, hit in re.findall(r"direct, ([\w -]+?) +64 +[\d.]+ +([\d.]+)", out)}
    assert rates["KV-aware"] >= 0.99
    assert rates["round robin"] < 0.95
    assert re.search(r"raw pass-through +64 +0\.\d+ +0\.\d+ +192\.\.192 +1\.000 +\d+ ", out)
