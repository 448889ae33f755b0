"""A reward that cannot judge is refused before anything starts: one line that names the key, and the way out."""

import json
import subprocess
import sys

import pytest
from preflight_home import ROW, check, write_rows

TESTS = json.dumps({"tests": [{"stdin": "1", "stdout": "1"}]})
RUBRIC = "rubric.txt"
JUDGE = f"{{kind: judge, url: 'http://judge:1', rubric_path: {RUBRIC}}}"


def code_rows(home, answer=TESTS):
    write_rows(home, ROW | {"answer": answer})
    (home / "held.jsonl").write_text(json.dumps(ROW | {"answer": TESTS}) + "\n")


def nothing(home):
    """The fault is in the overrides."""


CASES = {
    "kind that does not exist": (
        ["reward.kind=maths"],
        nothing,
        "spec.yaml: reward.kind: there is no kind 'maths' here; did you mean 'math'?",
    ),
    "kind far from any": (
        ["reward.kind=oracle"],
        nothing,
        "spec.yaml: reward.kind: there is no kind 'oracle' here; choose one of math, code, function, http, model, "
        "served_model, judge, composite",
    ),
    "composite in a composite": (
        ["reward={kind: composite, parts: [{weight: 1, reward: {}}, {weight: 1, reward: {kind: composite}}]}"],
        nothing,
        "spec.yaml: reward.parts.1.reward.kind: there is no kind 'composite' here; choose one of math, code, function, "
        "http, model, served_model, judge",
    ),
    "misspelt key of a part": (
        ["reward={kind: composite, parts: [{weight: 1, reward: {timout_s: 3}}, {weight: 1, reward: {}}]}"],
        nothing,
        "spec.yaml: unknown key 'reward.parts.0.reward.timout_s'; did you mean 'reward.parts.reward.timeout_s'?",
    ),
    "key of another kind": (
        ["reward.url=http://here:1"],
        nothing,
        "spec.yaml: reward: kind math does not read 'url', which belongs to http and served_model and judge; drop it",
    ),
    "missing key": (["reward={kind: http}"], nothing, "spec.yaml: 'reward.url' is missing"),
    "url of another protocol": (
        ["reward={kind: http, url: 'ftp://here'}"],
        nothing,
        "spec.yaml: reward.url: string should match pattern '^https?://[^\\s/]+' (found 'ftp://here')",
    ),
    "worker killed before a test's own limit": (
        ["reward={kind: code, timeout_s: 5}"],
        nothing,
        "spec.yaml: reward: timeout_s = 5 must exceed test_wall_s = 15: a response that hangs is wrong, but a worker "
        "that is killed has failed",
    ),
    "failure of the part that decides": (
        ["reward={kind: composite, parts: [{weight: 1, reward: {on_failure: zero}}, {weight: 1, reward: {}}]}"],
        nothing,
        "spec.yaml: reward: the first of the parts says whether a response is correct, so that without it there is no "
        "reward; set on_failure of the composite instead of the part's",
    ),
    "answers that are no tests": (
        ["reward={kind: code}"],
        lambda home: code_rows(home, "42"),
        "train.jsonl:1: reward.kind code: the answer is not the tests of a program: Expected `object`, got `int`",
    ),
    "more memory than there is": (
        ["reward={kind: code, workers: 16, processes: 16, memory_mib: 512}"],
        code_rows,
        "reward.memory_mib: 16 workers * 16 processes * 512 MiB are 128.0 GiB, which programs may all use, and 64.0 "
        "GiB are available; lower one of them",
    ),
    "function that is not there": (
        ["reward={kind: function, function: 'nowhere:judge'}"],
        nothing,
        "reward.function: cannot load nowhere:judge: No module named 'nowhere'; is it on PYTHONPATH?",
    ),
    "function of other parameters": (
        ["reward={kind: function, function: 'preflight_home:change'}"],
        nothing,
        "reward.function: preflight_home:change takes (file, values), it must take (request)",
    ),
    "no rubric": (
        [f"reward={JUDGE}"],
        nothing,
        f"reward.rubric_path: {RUBRIC} cannot be read: [Errno 2] No such file or directory: '{RUBRIC}'",
    ),
    "rubric without the response": (
        [f"reward={JUDGE}"],
        lambda home: (home / RUBRIC).write_text("Is {answer} right?"),
        f"reward.rubric_path: {RUBRIC} has no {{response}}: the judge would not see what it judges",
    ),
    "no token": (
        ["reward={kind: http, url: 'http://here', token_variable: NO_SUCH_TOKEN}"],
        nothing,
        "reward.token_variable: the environment has no NO_SUCH_TOKEN, which is to hold the service's bearer token; "
        "export it",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_s3_a_reward_that_cannot_judge_is_one_clear_line_and_nothing_starts(home, case):
    """Injected: the fault that the case is named after."""
    overrides, prepare, expected = CASES[case]
    prepare(home)
    assert check(home, *overrides) == (2, [expected])


@pytest.mark.parametrize(
    "reward",
    [
        "{kind: code}",
        "{kind: function, function: 'own_reward:judge'}",
        "{kind: http, url: 'http://here:1/score'}",
        JUDGE,
        f"{{kind: composite, parts: [{{weight: 0.9, reward: {{kind: code}}}}, {{weight: 0.1, reward: {JUDGE}}}]}}",
    ],
)
def test_a_sound_reward_of_each_kind_passes(home, reward, monkeypatch):
    code_rows(home)
    (home / RUBRIC).write_text("{prompt} {response}")
    (home / "own_reward.py").write_text("def judge(request):\n    return True\n")
    monkeypatch.syspath_prepend(home)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert check(home, f"reward={reward}") == (0, [])


def test_r1_code_without_a_sandbox_is_refused_before_anything_starts(home):
    """Injected: a kernel that makes no namespaces (the sandbox's own filter, on the whole of `slimerl check`)."""
    code_rows(home)
    program = (
        "import sys\n"
        "from slimerl.cli import app\n"
        "from slimerl.rewards.sandbox.system_calls import refuse_dangerous_calls\n"
        "refuse_dangerous_calls()\n"
        "app(['check', 'spec.yaml', 'reward={kind: code}'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=home)
    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("reward.")]
    assert line.startswith(
        "reward.kind: code is refused, since programs of the model would run without a sandbox: no new namespaces can "
        "be made here"
    )
    assert "kernel.unprivileged_userns_clone=1" in line
