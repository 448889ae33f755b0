"""A judgement is right, wrong or unparsable, by the order of its scores alone."""

import pytest

from slimerl.rewards.outcome import Failed, RewardRequest, Scored, Unparsable, outcome_name
from slimerl.rewards.preference import score


def judged(response, answer="2 of 2"):
    return score(RewardRequest("s", response, answer))


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("b125 xx= ===[1,3]", Scored(1.0, True, said="2")),
        ("First principle: … The second answer carries.\nScores: [4, 9]\n", Scored(1.0, True, said="2")),
        ("[0,1000]", Scored(1.0, True, said="2")),
        ("n015 === xx=[3,1]", Scored(0.0, False, said="1")),
        ("[3,1] no: [1,3]", Scored(1.0, True, said="2")),
        ("n015 === ===[3,3]", Scored(0.0, False, "tie", "tie")),
    ],
)
def test_the_best_answer_alone_must_have_the_highest_score(response, outcome):
    assert judged(response) == outcome


@pytest.mark.parametrize(
    "response", ["", "b125 xx= ===", "[1,3", "[1 3]", "[1.5,3]", "[-1,3]", "[1,3] or so", "[3]", "[1,3,2]", "[,3]"]
)
def test_what_has_no_integer_for_each_answer_at_its_end_is_unparsable_and_not_wrong(response):
    assert judged(response) == Unparsable()


def test_of_any_number_of_answers_one_is_the_best():
    assert judged("[1, 7, 3]", "2 of 3") == Scored(1.0, True, said="2")
    assert judged("[7, 1, 7]", "1 of 3") == Scored(0.0, False, "tie", "tie")


@pytest.mark.parametrize("answer", ["125", "0 of 2", "3 of 2", "2 of", ""])
def test_a_row_that_does_not_name_the_best_answer_is_a_failure_of_the_judging(answer):
    outcome = judged("[1,3]", answer)
    assert isinstance(outcome, Failed)
    assert outcome_name(outcome) == "failed_bad_answer"
