"""What the rejective filter keeps, what it rejects and why."""

import asyncio
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path

import pytest
from tiny_run import write_spec

from slimerl.conductor.run_directory import holds_other_files
from slimerl.engine.client import EngineError
from slimerl.engine.protocol import Generation
from slimerl.rewards.outcome import Failed, Scored, Unparsable
from slimerl.rollout.judge import Judge
from slimerl.rollout.prompts import Prompt
from slimerl.rollout.tokenizer import PromptTokenizer
from slimerl.samples.rows import parse_rows
from slimerl.spec import load_spec

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from rejective_filter import Response, Sampler, reasons_table, sift, unwritable

TOOL = Path(__file__).parents[2] / "tools" / "rejective_filter.py"
RIGHT, WRONG, TIE = Scored(1.0, True), Scored(0.0, False), Scored(0.0, False, "tie")
EVEN = """
def score(request):
    return len(request.response) % 2 == 0
"""


@pytest.mark.parametrize(
    ("responses", "kept", "reasons"),
    [
        ([Response("a", RIGHT), Response("b", WRONG)], ["a"], {"kept": 1, "wrong": 1}),
        ([Response("a", RIGHT), Response("b", RIGHT), Response("c", TIE)], ["a", "b"], {"kept": 2, "wrong_tie": 1}),
        ([Response("a", RIGHT), Response("b", Unparsable())], ["a"], {"kept": 1, "unparsable": 1}),
        (
            [Response("a", RIGHT), Response("a", RIGHT), Response("b", WRONG)],
            ["a"],
            {"kept": 1, "repeated": 1, "wrong": 1},
        ),
        ([Response("a", RIGHT), Response("b", RIGHT)], [], {"too_easy": 2}),
        ([Response("a", WRONG), Response("b", Unparsable())], [], {"wrong": 1, "unparsable": 1}),
        ([Response("a", RIGHT), Response("b", RIGHT, complete=False)], ["a"], {"kept": 1, "cut_off": 1}),
        ([Response(" ", RIGHT), Response("b", WRONG)], [], {"empty": 1, "wrong": 1}),
        ([Response("a", RIGHT), Response("b", Failed("timeout"))], [], {"too_easy": 1, "failed_timeout": 1}),
        ([Response("a", Failed("timeout"))], [], {"failed_timeout": 1}),
    ],
)
def test_a_right_response_is_kept_unless_all_that_were_judged_are_right(responses, kept, reasons):
    sifted = sift(responses)
    assert sifted.kept == kept
    assert sifted.reasons == Counter(reasons)


def test_the_table_counts_every_response_once():
    sifted = [sift([Response("a", RIGHT), Response("b", WRONG)]), sift([Response("a", RIGHT), Response("b", RIGHT)])]
    columns = [list(column.cells) for column in reasons_table(sifted).columns]
    assert dict(zip(*columns[:2], strict=True)) == {"kept": "1", "wrong": "1", "too_easy": "2"}


class Engine:
    """Answers as an engine's client does, but fails the first requests."""

    def __init__(self, failures):
        self.failures = failures

    async def generate(self, tokens, params, timeout_s):
        if self.failures:
            self.failures -= 1
            raise EngineError("engine-0", "/generate", "no JSON")
        return Generation([7], [-0.5], [0], "stop", {}, {})


class AllRight:
    async def score(self, request):
        return RIGHT


@pytest.mark.parametrize(("failures", "gives_up"), [(2, False), (3, True)])
def test_an_answer_that_makes_no_sense_costs_a_try_and_not_all_that_was_sampled(tmp_path, failures, gives_up):
    spec = load_spec(write_spec(tmp_path))
    tokenizer = PromptTokenizer(spec.model.path, spec.data)
    judge = Judge(tokenizer.decode, AllRight())
    sampler = Sampler(spec, tokenizer, judge, cycle([Engine(failures)]), 1)
    try:
        with pytest.raises(EngineError) if gives_up else nullcontext():
            response = asyncio.run(sampler.respond(Prompt("p1", tuple(tokenizer.encode(["1="])[0]), "1"), 0))
            assert (response.right, response.complete) == (True, True)
    finally:
        judge.close()


def run_filter(spec, *arguments, path=""):
    command = [sys.executable, TOOL, spec, *arguments]
    paths = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=250, check=False
    )


def test_responses_of_a_real_engine_become_rows_for_fine_tuning(tmp_path):
    """A random model that ends by chance, and a reward that about half of its responses earn."""
    (tmp_path / "even_length.py").write_text(EVEN)
    spec = write_spec(
        tmp_path,
        reward={"kind": "function", "function": "even_length:score"},
        rollout={"samples_per_prompt": 16, "max_new_tokens": 100},
    )
    out = tmp_path / "kept.jsonl"
    overrides = f"output_dir={tmp_path / 'filter'}"
    done = run_filter(spec, overrides, "--out", out, "--prompts", "6", path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = parse_rows(out.read_text().splitlines(), str(out), "response")
    assert rows
    assert all(len(row.target) % 2 == 0 and row.target.strip() for row in rows)
    assert len({row.prompt for row in rows}) > 1
    assert all(re.fullmatch(r"p\d/\d+", row.row_id) and row.prompt == f"{row.row_id[1]}=" for row in rows)
    counts = {name: int(number) for name, number in re.findall(r"│ (\w+) +│ +(\d+) │", done.stdout)}
    assert counts.keys() >= {"kept", "wrong", "cut_off"}
    assert sum(counts.values()) == 6 * 16
    assert counts["kept"] == len(rows)
    assert "sampled 6/6 prompts" in done.stdout
    assert not holds_other_files(tmp_path / "filter"), "it could be started again"


def test_a_file_for_the_rows_that_cannot_be_written_is_refused_before_anything_is_sampled(tmp_path):
    """Injected: a directory in its place, and a file in the place of its directory."""
    (tmp_path / "taken").touch()
    assert unwritable(tmp_path / "new" / "rows.jsonl") == ""
    assert not (tmp_path / "new" / "rows.jsonl").exists(), "an empty one would pass for what was kept"
    assert unwritable(tmp_path / "taken") == "", "an earlier one is replaced"
    assert unwritable(tmp_path).endswith("is a directory; name a file")
    assert "cannot be written" in unwritable(tmp_path / "taken" / "rows.jsonl")
    done = run_filter(write_spec(tmp_path), "--out", tmp_path / "taken" / "rows.jsonl")
    assert (done.returncode, "cannot be written" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"algorithm": {"name": "sft"}, "data": {"eval_path": None}}, "algorithm.name = sft samples nothing"),
        ({"model": {"path": "missing"}}, "model.path"),
    ],
)
def test_a_spec_that_cannot_be_sampled_from_is_refused_before_an_engine_starts(tmp_path, sections, problem):
    done = run_filter(write_spec(tmp_path, **sections), "--out", tmp_path / "kept.jsonl")
    assert done.returncode == 2
    assert problem in done.stderr
    assert not (tmp_path / "kept.jsonl").exists()
