"""The calculator quickstart's data: what the warm start may know, and what it may not."""

import json
import sys
from pathlib import Path

import pytest

from slimerl.environments.calculator import calculate
from slimerl.rollout.agents.formats import PlainFormat
from slimerl.spec import load_spec

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from quickstart_data import CALCULATOR_TAKEN, HELDOUT, MISTYPED, PRODUCTS, write_products

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart_calculator.yaml"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("products")
    write_products(out, 1234)
    return {
        name: [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        for name in ("sft", "train", "heldout")
    }


def test_held_out_products_are_in_neither_training_file(rows):
    held_out = {row["id"] for row in rows["heldout"]}
    assert len(held_out) == HELDOUT
    assert len({row["id"] for row in rows["train"]}) == PRODUCTS
    assert held_out.isdisjoint(row["id"] for row in rows["train"])
    assert held_out.isdisjoint(row["id"].removesuffix(" answered") for row in rows["sft"])
    assert all(row["answer"] == calculate(row["prompt"].removesuffix("=")) for row in rows["heldout"] + rows["train"])


def test_the_pupil_asks_seldom_mistypes_and_reads_well(rows):
    first = [row for row in rows["sft"] if not row["id"].endswith(" answered")]
    asked = [(row, call) for row in first for call in PlainFormat().calls(row["response"])]
    assert len(asked) / len(first) == pytest.approx(CALCULATOR_TAKEN, abs=0.02)
    right = [row for row, call in asked if f"{call.argument}=" == row["prompt"]]
    assert 1 - len(right) / len(asked) == pytest.approx(MISTYPED, abs=0.02)
    answered = [row for row in rows["sft"] if row["id"].endswith(" answered")]
    assert len(answered) == len(asked)
    assert all(row["prompt"].endswith(f"<eos>{row['response']}\n") for row in answered)
    guesses = {row["id"]: row["response"] for row in first if not PlainFormat().calls(row["response"])}
    correct = {row["id"]: row["answer"] for row in rows["train"]}
    assert sum(correct[name] == guess for name, guess in guesses.items()) < 0.01 * len(guesses)


def test_the_quickstart_judges_by_the_exact_rule():
    spec = load_spec(CONFIG)
    assert spec.reward.function == "slimerl.rewards.exact:score"
    assert (spec.agent.kind, spec.agent.max_turns) == ("tools", 2)
