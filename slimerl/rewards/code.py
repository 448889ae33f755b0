"""The code rule: the response's last block of Python against the row's tests, in a sandbox.

The row's answer is JSON: `{"tests": [{"stdin": "1 2\\n", "stdout": "3\\n"}, …]}`, each a run of the whole program, or
`{"checks": ["assert add(1, 2) == 3", …]}`, run after the program in its namespace.
Whatever the program does (hang, crash, fill the memory) is a wrong answer with a name, since a policy must learn not to
write such programs; that the sandbox itself failed is a failure. Runs in a worker process.
"""

import re
from collections.abc import Callable, Iterator

import msgspec

from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored, Unparsable
from slimerl.rewards.sandbox import Ending, Execution, Limits, Program, SandboxError, execute, probe

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
_STDIN_BYTES = 64 * 2**20


class Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Standard input and what is to be printed; spaces at the ends of lines and of the whole do not count."""

    stdout: str
    stdin: str = ""


class Tests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tests: tuple[Example, ...] = ()
    checks: tuple[str, ...] = ()


def parse_tests(answer: str) -> Tests:
    """Raises ValueError: what is wrong with it, in words."""
    try:
        tests = msgspec.json.decode(answer, type=Tests)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the answer is not the tests of a program: {error}") from None
    if bool(tests.tests) == bool(tests.checks):
        raise ValueError("the answer must have either 'tests' or 'checks'")
    if any(len(each.stdin) > _STDIN_BYTES for each in tests.tests):
        raise ValueError(f"the standard input of a test has more than {_STDIN_BYTES} characters")
    for check in tests.checks:
        try:
            compile(check, "check", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"check {check!r} is not Python: {error}") from None
        if "\0" in check:
            raise ValueError(f"check {check!r} has a NUL character")
    return tests


def last_program(response: str) -> str | None:
    """The last fenced block of Python, or of no named language. An unfinished one is none."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else None


def scorer(
    cpu_s: int,
    wall_s: float,
    memory_bytes: int,
    processes: int,
    output_bytes: int,
    files_bytes: int,
    partial_credit: bool,
) -> Callable[[RewardRequest], Outcome]:
    """For a worker. Raises SandboxError where none can be had."""
    trouble = probe()
    if trouble is not None:
        raise SandboxError(trouble)
    limits = Limits(cpu_s, wall_s, memory_bytes, processes, output_bytes, files_bytes)
    return lambda request: score(request, limits, partial_credit)


def score(request: RewardRequest, limits: Limits, partial_credit: bool = False) -> Outcome:
    """1 where all tests pass (with `partial_credit` the fraction that does), else 0."""
    try:
        tests = parse_tests(request.answer)
    except ValueError as error:
        return Failed("bad_answer", str(error))
    source = last_program(request.response)
    if source is None:
        return Unparsable()
    try:
        if tests.checks:
            return _checked(source, tests.checks, limits, partial_credit)
        return _compared(source, tests.tests, limits, partial_credit)
    except SandboxError as error:
        return Failed("sandbox", str(error))


def _compared(source: str, examples: tuple[Example, ...], limits: Limits, partial_credit: bool) -> Outcome:
    verdicts = []
    for verdict in _verdicts(source, examples, limits):
        verdicts.append(verdict)
        if verdict and not partial_credit:
            break
    return _scored(verdicts.count(""), len(examples), next(filter(None, verdicts), ""), partial_credit)


def _verdicts(source: str, examples: tuple[Example, ...], limits: Limits) -> Iterator[str]:
    """Of each example in turn why it fails, or nothing."""
    for example in examples:
        execution = execute(Program(source, example.stdin.encode("utf-8", "replace")), limits)
        if execution.ending is not Ending.WELL:
            yield execution.ending.value
        elif _plain(execution.stdout.decode(errors="replace")) != _plain(example.stdout):
            yield "output"
        else:
            yield ""


def _plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _checked(source: str, checks: tuple[str, ...], limits: Limits, partial_credit: bool) -> Outcome:
    execution = execute(Program(source, checks=checks), limits)
    return _scored(sum(execution.passed), len(checks), _check_verdict(execution, len(checks)), partial_credit)


def _check_verdict(execution: Execution, count: int) -> str:
    if execution.ending is not Ending.WELL:
        return execution.ending.value
    if len(execution.passed) < count:
        return "ended_early"
    return "" if all(execution.passed) else "check"


def _scored(passed: int, count: int, verdict: str, partial_credit: bool) -> Scored:
    correct = passed == count
    return Scored(passed / count if partial_credit else float(correct), correct, "" if correct else verdict)
