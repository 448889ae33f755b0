"""Environments of other packages; skipped where these are not installed."""

import importlib
from pathlib import Path

import pytest

from slimerl.environments.environment import Step, Task
from slimerl.environments.made import make_environment


def adapter(name: str, package: str):
    pytest.importorskip(package)
    return importlib.import_module(f"slimerl.environments.{name}_adapter")


def test_reasoning_gym_scores_an_answer_with_or_without_its_tags():
    rows = list(adapter("reasoning_gym", "reasoning_gym").rows("basic_arithmetic", 4, seed=3))
    environment = make_environment("reasoning_gym", {})
    states = [each.state for each in environment.reset([Task(row["prompt"], row["answer"], 0) for row in rows])]
    right = [state._entry["answer"] for state in states]
    assert all(right[place] != right[0] for place in (1, 2, 3))
    said = [f"It is <answer>{right[0]}</answer>.", right[1], right[0], "nonsense"]
    steps = environment.step(states, said)
    assert [step.correct for step in steps] == [True, True, False, False]
    assert [step.reward for step in steps][:2] == [1.0, 1.0]
    assert all(step.done for step in steps)


def test_verifiers_environments_answer_turns_and_score_with_their_rubric(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    rows = list(adapter("verifiers", "verifiers").rows("verifiers_guess", 4))
    assert rows[1]["prompt"] == "Guess number 1"
    environment = make_environment("verifiers", {"environment": "verifiers_guess", "max_turns": 3})
    states = [each.state for each in environment.reset([Task(row["prompt"], row["answer"], 0) for row in rows])]
    first = environment.step(states, ["5", "5", "20", "5"])
    assert [step.observation for step in first] == ["lower", "higher", "", "higher"]
    assert first[2] == Step(reward=1.0, done=True, correct=True)
    left = [states[0], states[1], states[3]]
    assert [step.done for step in environment.step(left, ["1", "10", "60"])] == [False, True, False]
    last = environment.step([states[0], states[3]], ["0", "70"])
    assert [(step.done, step.reward) for step in last] == [(True, 1.0), (True, 0.0)], "of three turns at most"
