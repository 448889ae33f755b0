"""What is expected of a response: by its siblings first, then by all; never more than it may have."""

from hypothesis import given
from hypothesis import strategies as st

from slimerl.rollout.lengths import PER_PROMPT, ResponseLengths


def test_nothing_known_means_the_whole_budget():
    assert ResponseLengths().expected("a", 0, 256) == 256


def test_siblings_tell_more_than_other_prompts():
    lengths = ResponseLengths()
    for tokens in (10, 20, 30):
        lengths.observe("short", tokens)
    lengths.observe("long", 200)
    assert lengths.expected("short", 0, 256) == 20
    assert lengths.expected("long", 0, 256) == 200
    assert lengths.expected("unseen", 0, 256) == (10 + 20 + 30 + 200) / 4


def test_only_responses_longer_than_what_is_there_tell_what_is_left():
    lengths = ResponseLengths()
    for tokens in (10, 100, 140):
        lengths.observe("a", tokens)
    assert lengths.expected("a", 50, 200) == 120 - 50
    lengths.observe("b", 180)
    assert lengths.expected("a", 150, 100) == 30, "none of its siblings got that far, another prompt's did"
    assert lengths.expected("a", 190, 66) == 66


def test_of_a_prompt_the_last_responses_count_all_alike():
    lengths = ResponseLengths()
    for tokens in range(1, PER_PROMPT + 1):
        lengths.observe("a", 10 * tokens)
        assert lengths.expected("a", 0, 1000) == round(10 * (tokens + 1) / 2)
    lengths.observe("a", 170)
    assert lengths.expected("a", 0, 1000) == round(10 * (2 + 17) / 2)


def test_what_was_seen_long_ago_is_forgotten():
    lengths = ResponseLengths(prompts=2)
    for prompt in ("a", "b", "a", "c"):
        lengths.observe(prompt, 5)
    for _ in range(PER_PROMPT):
        lengths.observe("a", 50)
    assert lengths.expected("a", 0, 100) == 50
    assert lengths.expected("b", 0, 100) != 5, "forgotten: expected as all are"


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 10_000))),
    st.integers(0, 10_000),
    st.integers(1, 10_000),
)
def test_it_is_at_least_one_token_and_at_most_the_budget(observed, done, budget):
    lengths = ResponseLengths(prompts=3)
    for prompt, tokens in observed:
        lengths.observe(prompt, tokens)
    for prompt in "abcde":
        assert 1 <= lengths.expected(prompt, done, budget) <= budget
