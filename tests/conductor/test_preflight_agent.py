"""An agent that cannot act is refused before anything starts: one line that names the key, and the way out."""

import sys

import pytest
from preflight_home import ROW, check, write_rows

FUNCTIONS = """
async def loop(policy, sample, prompt, texts):
    await policy.turn()

def plain(policy, sample, prompt, texts):
    pass

async def short(policy, sample):
    pass

def tool(argument):
    return argument

def pair(left, right):
    return left

def make(size=3):
    return None
"""


@pytest.fixture
def functions(home, monkeypatch):
    (home / "agent_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(home))
    yield home
    sys.modules.pop("agent_functions", None)


TOOLS = "kind: tools, format: plain, tools"
CASES = {
    "kind that does not exist": (
        "agent.kind=tool",
        "spec.yaml: agent.kind: there is no kind 'tool' here; did you mean 'tools'?",
    ),
    "key of another kind": (
        "agent={kind: tools, format: plain, tools: [calc], function: 'a:b'}",
        "spec.yaml: agent: kind tools does not read 'function', which belongs to function; drop it",
    ),
    "misspelt key": (
        f"agent={{{TOOLS}: [calc], max_turn: 2}}",
        "spec.yaml: unknown key 'agent.max_turn'; did you mean 'agent.max_turns'?",
    ),
    "no tools": ("agent={kind: tools, format: plain}", "spec.yaml: 'agent.tools' is missing"),
    "unknown tool": (
        f"agent={{{TOOLS}: [calculator]}}",
        "spec.yaml: agent.tools.0: there is no tool 'calculator'; choose one of calc, python, or name a function of "
        "yours as package.module:function (found 'calculator')",
    ),
    "two of one name": (
        f"agent={{{TOOLS}: [calc, 'a.b:calc']}}",
        "spec.yaml: agent: two of the tools calc, a.b:calc are called by one name; rename a function",
    ),
    "worker killed before a program's own limit": (
        f"agent={{{TOOLS}: [python], timeout_s: 5}}",
        "spec.yaml: agent: timeout_s = 5 must exceed python_wall_s = 15: a program that hangs is the policy's, but a "
        "worker that is killed drops the sample",
    ),
    "format without a template": (
        "agent={kind: tools, tools: [calc]}",
        "spec.yaml: agent.format hermes takes the form of tools' messages from the chat template: set "
        "data.chat_template: true, or agent.format: plain",
    ),
    "no responses": (
        ["algorithm={name: sft}", f"agent={{{TOOLS}: [calc]}}"],
        "spec.yaml: agent.kind tools continues responses, and the algorithm samples none; drop the section agent",
    ),
    "tool that is not there": (
        f"agent={{{TOOLS}: ['agent_functions:nothing']}}",
        "agent.tools: cannot load agent_functions:nothing: module 'agent_functions' has no attribute 'nothing'; is it "
        "on PYTHONPATH?",
    ),
    "tool of two arguments": (
        f"agent={{{TOOLS}: ['agent_functions:pair']}}",
        "agent.tools: agent_functions:pair takes (left, right), it must take (argument)",
    ),
    "loop that is not async": (
        "agent={kind: function, function: 'agent_functions:plain'}",
        "agent.function: agent_functions:plain must be an async function",
    ),
    "loop of other parameters": (
        "agent={kind: function, function: 'agent_functions:short'}",
        "agent.function: agent_functions:short takes (policy, sample), it must take (policy, sample, prompt, texts)",
    ),
    "environment that is not installed": (
        "agent={kind: environment, environment: reasoning_gym}",
        "agent.environment: reasoning_gym is not installed here (No module named 'reasoning_gym'); pip install "
        "reasoning-gym",
    ),
    "environment that takes no such option": (
        "agent={kind: environment, environment: 'agent_functions:make', options: {sizes: 4}}",
        "agent.options: agent_functions:make cannot be made from {'sizes': 4}: got an unexpected keyword argument "
        "'sizes'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_names_the_key_and_the_way_out(functions, case):
    given, wanted = CASES[case]
    write_rows(functions, ROW)
    code, lines = check(functions, *([given] if isinstance(given, str) else given))
    assert code == 2
    assert wanted in lines, lines


@pytest.mark.parametrize(
    "agent",
    [
        f"{{{TOOLS}: [calc, 'agent_functions:tool']}}",
        "{kind: function, function: 'agent_functions:loop'}",
        "{kind: environment, environment: 'agent_functions:make', options: {size: 4}, reward: sum}",
        "{kind: single_turn}",
    ],
)
def test_a_sound_agent_passes(functions, agent):
    write_rows(functions, ROW)
    assert check(functions, f"agent={agent}") == (0, [])
