"""The data of the quickstart's generative reward model: what its warm start may know, and what it may not."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from slimerl.rewards.outcome import RewardRequest, Scored
from slimerl.rewards.preference import score
from slimerl.spec import load_spec

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from judge_data import JUDGE_CHARACTERS, PAIRS, answers_of, judgement, principle_of, write_pairs
from quickstart_data import CARRY_FORGOTTEN, HELDOUT, write_problems

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = ("sft", "train", "heldout")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("pairs")
    write_pairs(out, 1234)
    return {name: read(out / f"{name}.jsonl") for name in FILES}


def addends(row):
    a, b = row["prompt"].partition("=")[0].split("+")
    return int(a), int(b)


def test_held_out_sums_are_those_of_the_quickstart_and_in_neither_training_file(rows, tmp_path):
    write_problems(tmp_path, 1234)
    held_out = {row["id"] for row in rows["heldout"]}
    assert held_out == {row["id"] for row in read(tmp_path / "heldout.jsonl")}
    assert len(held_out) == HELDOUT
    assert held_out.isdisjoint(row["id"] for row in rows["train"])
    assert held_out.isdisjoint(row["id"].split()[0] for row in rows["sft"])
    assert len(rows["sft"]) == PAIRS * len(rows["train"]) == PAIRS * (90 * 90 - HELDOUT)


def test_the_same_seed_gives_the_same_files_and_another_one_others(rows, tmp_path):
    for seed in (1234, 1235):
        write_pairs(tmp_path / str(seed), seed)
    for name in FILES:
        assert read(tmp_path / "1234" / f"{name}.jsonl") == rows[name]
        assert read(tmp_path / "1235" / f"{name}.jsonl") != rows[name]


def test_one_answer_is_right_and_stands_first_as_often_as_second(rows):
    for row in rows["train"] + rows["heldout"]:
        right = [int(each) == sum(addends(row)) for each in answers_of(row["prompt"])]
        assert row["answer"] == f"{right.index(True) + 1} of 2"
        assert right.count(True) == 1
    for name in ("train", "heldout"):
        first = sum(row["answer"] == "1 of 2" for row in rows[name]) / len(rows[name])
        assert first == pytest.approx(0.5, abs=3 * 0.5 / len(rows[name]) ** 0.5)


def test_every_character_of_the_data_is_a_token(rows):
    texts = [row.get("response", "") + row["prompt"] for name in FILES for row in rows[name]]
    assert set().union(*texts) == set(JUDGE_CHARACTERS)
    assert len(JUDGE_CHARACTERS) == len(set(JUDGE_CHARACTERS))


@pytest.mark.parametrize(("a", "b", "columns"), [(12, 34, "n"), (17, 34, "u"), (52, 73, "t"), (57, 68, "b")])
def test_the_principle_names_the_columns_that_carry(a, b, columns):
    assert principle_of(a, b) == columns


def test_a_judge_that_forgets_to_carry_prefers_the_mistake_that_it_makes_itself():
    answers = ["015", "125"]
    assert judgement(57, 68, answers, forgets=False) == "b125 xx= ===[1,3]"
    assert judgement(57, 68, answers, forgets=True) == "n015 === xx=[3,1]"


def test_the_warm_start_has_seen_right_and_wrong_verdicts_all_of_them_parsable(rows):
    verdicts = Counter()
    for row in rows["sft"]:
        a, b = addends(row)
        if principle_of(a, b) == "n":
            continue
        best = answers_of(row["prompt"]).index(f"{a + b:03d}") + 1
        outcome = score(RewardRequest("s", row["response"], f"{best} of 2"))
        assert isinstance(outcome, Scored)
        verdicts["forgets" if row["response"][0] == "n" else "carries", outcome.correct] += 1
    assert verdicts["carries", False] == 0, "who carries is right"
    forgets = verdicts["forgets", False] + verdicts["forgets", True]
    assert forgets / verdicts.total() == pytest.approx(CARRY_FORGOTTEN, abs=0.02)
    assert verdicts["forgets", False] > 0.5 * forgets


def test_each_stage_goes_on_from_the_one_before():
    warm, filtered, rl = (
        load_spec(CONFIGS / f"quickstart_grm{stage}.yaml") for stage in ("_warm_start", "_filtered", "")
    )
    assert (warm.algorithm.name, filtered.algorithm.name, rl.algorithm.name) == ("sft", "sft", "grpo")
    assert filtered.model.path == warm.training.export_path
    assert rl.model.path == filtered.training.export_path
    assert rl.reward.function == "slimerl.rewards.preference:score"
    assert rl.evaluation.sets[0].majority_at
