"""Tools in their workers: what a policy does wrong is told, what breaks is a failure with a name."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from slimerl.environments.calls import ToolAnswer, ToolCall
from slimerl.environments.tool_worker import describe, shortened
from slimerl.environments.toolbox import Toolbox
from slimerl.rewards.outcome import Failed
from slimerl.rewards.pool import PoolError
from slimerl.spec.agent import ToolsAgent
from slimerl.spec.functions import CustomFunctionError


@pytest.fixture(autouse=True)
def _found_by_workers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


def answers(calls: Sequence[ToolCall], **spec) -> list[ToolAnswer | Failed]:
    agent = ToolsAgent(**{"kind": "tools", "timeout_s": 20.0, **spec})

    async def asked() -> list[ToolAnswer | Failed]:
        toolbox = Toolbox.of(agent)
        try:
            await toolbox.start()
            return [await toolbox.call(call) for call in calls]
        finally:
            await toolbox.close()

    return asyncio.run(asked())


def test_tools_answer_and_tell_what_is_wrong_with_a_call():
    tools = ["calc", "foreign_tools:shout", "foreign_tools:odd"]
    calls = [("calc", "6*7"), ("shout", "hey"), ("calc", "6/0"), ("odd", "raise"), ("lookup", "x"), ("odd", "x" * 900)]
    found = answers([ToolCall(*call) for call in calls], tools=tools, format="plain", output_characters=100)
    assert found[:2] == [ToolAnswer("42"), ToolAnswer("HEY")]
    assert found[2] == ToolAnswer("error: division by zero", "arithmetic")
    assert found[3] == ToolAnswer("error: KeyError: 'no such entry'", "raised")
    assert found[4] == ToolAnswer("error: there is no tool 'lookup'; there is calc, shout, odd", "unknown_tool")
    assert isinstance(found[5], ToolAnswer)
    assert len(found[5].text) == 100


def test_r1_a_tool_that_hangs_dies_or_returns_no_text_fails_by_name_and_is_replaced():
    calls = [ToolCall("odd", what) for what in ("number", "hang", "die", "memory", "still here")]
    *failed, after = answers(calls, tools=["foreign_tools:odd"], timeout_s=3.0)
    assert [each.reason for each in failed if isinstance(each, Failed)] == [
        "bad_return",
        "timeout",
        "worker_died",
        "memory",
    ]
    assert after == ToolAnswer("still here")


def test_python_runs_in_the_sandbox_and_its_failures_are_the_policys():
    programs = {
        "print(sum(range(10)))": ToolAnswer("45"),
        "1 + 1": ToolAnswer("(it printed nothing)"),
        "while True: pass": ToolAnswer("error: it took too long", "time_limit"),
        "print('x' * 10**9)": None,
        "raise ValueError('wrong')": None,
        "import socket; socket.create_connection(('127.0.0.1', 22))": None,
        "open('/etc/passwd2', 'w')": None,
    }
    calls = [ToolCall("python", program) for program in programs]
    limits = {"python_cpu_s": 1, "python_wall_s": 5.0, "output_characters": 300}
    found = answers(calls, tools=["python"], **limits)
    for given, wanted in zip(found, programs.values(), strict=True):
        assert isinstance(given, ToolAnswer)
        assert wanted is None or given == wanted
        assert len(given.text) <= 300
    assert [each.failure for each in found if isinstance(each, ToolAnswer)][3:] == [
        "output_limit" if found[3].failure == "output_limit" else "memory_limit",  # type: ignore[union-attr]
        "raised",
        "raised",
        "raised",
    ]
    assert "ValueError: wrong" in found[4].text  # type: ignore[union-attr]


def test_a_long_answer_keeps_its_beginning_and_its_end():
    assert shortened("a" * 50 + "b" * 50, 23) == "a" * 10 + " … " + "b" * 10
    assert shortened("short", 5) == "short"
    assert all(len(shortened("long text", most)) <= most for most in range(1, 9))


def test_a_function_describes_itself_and_must_take_one_argument(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    told = describe("foreign_tools:shout")
    assert (told.name, told.parameter, told.description) == ("shout", "argument", "Writes a text in capitals.")
    with pytest.raises(CustomFunctionError, match=r"takes \(first, second\), it must take \(argument\)"):
        describe("foreign_tools:two")


def test_a_tool_that_cannot_be_loaded_is_told_at_the_start(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    agent = ToolsAgent(kind="tools", tools=("foreign_tools:shout",))
    toolbox = Toolbox.of(agent)
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(PoolError, match="cannot load foreign_tools:shout"):
        asyncio.run(toolbox.start())
