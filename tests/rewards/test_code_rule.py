"""What the code rule takes for a program, and what it makes of it, judged by a real worker in its sandbox."""

import json

import pytest
from sandbox_bench import ECHO, bench_with

from slimerl.rewards.code import last_program, parse_tests
from slimerl.rewards.outcome import Failed, RewardRequest, Scored, Unparsable


def test_a_program_that_passes_its_tests_is_correct(bench):
    answer = json.dumps({"tests": [{"stdin": "1 2\n", "stdout": "3"}, {"stdin": "5 -7\n", "stdout": "-2\n"}]})
    assert bench.judge("print(sum(map(int, input().split())))", answer) == Scored(1.0, True)


def test_a_function_that_passes_its_checks_is_correct(bench):
    answer = json.dumps({"checks": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]})
    assert bench.judge("def add(a, b):\n    return a + b", answer) == Scored(1.0, True)


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("print('pong')", "output"),
        ("print(input(), input())", "raised"),
        ("this is no Python", "raised"),
        ("import ctypes; ctypes.string_at(0)", "crashed"),
        ("import os; os.write(1, os.urandom(4096))", "output"),
    ],
)
def test_r2_a_wrong_program_says_why(bench, source, verdict):
    assert bench.judge(source) == Scored(0.0, False, verdict)


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("def f(x): return x", "check"),
        ("import sys; sys.exit(0)", "ended_early"),
        ("import os; os._exit(0)", "ended_early"),
        ("def f(x):\n    import os; os._exit(0)", "ended_early"),
        ("raise SystemExit(3)", "raised"),
        ("print('loaded'); f = lambda x: 'word 1'", "check"),
        ("import os\nos.write(3, b'loaded\\nword 1\\n')\nos._exit(0)", "ended_early"),
    ],
)
def test_r2_a_program_that_ends_before_its_checks_has_not_passed_them(bench, source, verdict):
    """Faults: the exit code says success, and no check was reached; the program tells the result of a check itself."""
    assert bench.judge(source, json.dumps({"checks": ["assert f(1) == 2"]})) == Scored(0.0, False, verdict)


def test_a_program_cannot_read_the_checks_before_they_run(bench):
    """Fault: the program looks for its checks in every file that it can see."""
    source = (
        "import os\n"
        "text = ''.join(open(os.path.join('/program', name)).read() for name in os.listdir('/program'))\n"
        "seen = 'unlikely' in text\n"
        "def f(unlikely): return seen"
    )
    assert bench.judge(source, json.dumps({"checks": ["assert f(0) is False"]})) == Scored(1.0, True)


def test_partial_credit_is_the_fraction_of_passed_tests():
    with bench_with(partial_credit=True) as bench:
        tests = [{"stdin": f"{number}", "stdout": "1"} for number in (1, 2, 1, 3)]
        assert bench.judge("print(input())", json.dumps({"tests": tests})) == Scored(0.5, False, "output")
        checks = ["assert f(1) == 1", "assert f(2) == 1", "assert f(1) == 1"]
        outcome = bench.judge("def f(x): return x", json.dumps({"checks": checks}))
        assert outcome == Scored(pytest.approx(2 / 3), False, "check")


@pytest.mark.parametrize("response", ["", "print(1)", "```python\nprint(1)", "```json\n{}\n```"])
def test_r2_a_response_without_a_finished_program_is_unparsable(bench, response):
    outcome = bench.loop.run_until_complete(bench.pool.score(RewardRequest("s", response, ECHO)))
    assert outcome == Unparsable()


def test_the_last_program_counts():
    assert last_program("```python\nold\n```\nBetter:\n```py\nnew\n```\nDone.") == "new\n"


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("42", "not the tests of a program"),
        ('{"tests": []}', "either 'tests' or 'checks'"),
        ('{"tests": [{"stdin": "1"}]}', "stdout"),
        ('{"tests": [{"stdout": "1"}], "checks": ["assert f()"]}', "either"),
        ('{"chekcs": ["assert f()"]}', "chekcs"),
        ('{"checks": ["assert f("]}', "is not Python"),
    ],
)
def test_r2_tests_that_cannot_be_run_are_a_failure_of_ours(bench, answer, fault):
    outcome = bench.judge("print(1)", answer)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "bad_answer"
    assert fault in outcome.detail
    with pytest.raises(ValueError, match=fault):
        parse_tests(answer)
