"""What the math rule takes for an answer, and what it makes of it."""

import pytest

from slimerl.rewards.math import score
from slimerl.rewards.outcome import Failed, RewardRequest, Scored, Unparsable


def outcome(response: str, answer: str):
    return score(RewardRequest("s", response, answer))


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is 42.", "42"),
        ("42", "42"),
        ("12 + 30 = 42", "42"),
        ("First 40, then 2 more: 42", "42"),
        (r"so \boxed{42}, not 7", "42"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        ("0.5", "1/2"),
        ("1,234", "1234"),
        ("-7", "-7"),
        (r"$2\sqrt{3}$", r"2\sqrt{3}"),
        ("7", r"$\boxed{7}$"),
    ],
)
def test_an_equal_expression_is_correct(response, answer):
    found = outcome(response, answer)
    assert found == Scored(1.0, True, said=found.said)


@pytest.mark.parametrize(
    ("response", "answer"),
    [("41", "42"), ("42 or 13", "42"), (r"42 \boxed{41}", "42"), ("-42", "42"), ("4 2", "42"), ("420", "42")],
)
def test_r2_another_expression_is_wrong(response, answer):
    found = outcome(response, answer)
    assert found == Scored(0.0, False, said=found.said)


def test_answers_that_are_written_alike_are_one_when_votes_are_counted():
    said = [outcome(response, "42").said for response in ("it is 41", r"so \boxed{41}", "40 + 1 = 41", "43")]
    assert said == ["41", "41", "41", "43"]


@pytest.mark.parametrize("response", ["", "I do not know", "\n\n", r"\boxed{}", "forty-two"])
def test_r2_a_response_without_expression_is_unparsable_and_not_wrong(response):
    assert outcome(response, "42") == Unparsable()


def test_r2_an_answer_of_the_data_that_is_no_expression_is_a_failure_of_ours():
    result = outcome("42", r"\boxed{}")
    assert isinstance(result, Failed)
    assert result.reason == "bad_answer"
