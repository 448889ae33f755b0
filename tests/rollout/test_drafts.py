"""Where drafts come from, against a search that looks everywhere; what is remembered, and for how long."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimerl.rollout.speculation.drafts import LONGEST_MATCH, MATCH, Drafts
from slimerl.rollout.speculation.drafts_file import DraftsFile

PROMPT = [9, 8, 7, 6, 5]
GROUP = "1/p"
LOTS = 10**9


def add(drafts: Drafts, group: str, number: int, tokens: list[int], version: int = 0, **options) -> None:
    logprobs = [-0.1 * (at + 1) for at in range(len(tokens))]
    values = {"context": PROMPT, "stopped": False, **options}
    drafts.add(group, f"{group}/{number}", tokens=tokens, logprobs=logprobs, version=version, **values)


def behind(drafts: Drafts, context: list[int], session: str = f"{GROUP}/0", limit: int = 64, version: int = 5):
    return drafts.behind(GROUP, session, context, limit, version)


def test_a_sample_that_begins_gets_what_the_epoch_before_answered():
    drafts = Drafts(LOTS)
    add(drafts, "0/p", 3, [1, 2, 3, 4], stopped=True)
    draft = behind(drafts, PROMPT)
    assert draft is not None
    assert (draft.tokens, draft.ends) == ((1, 2, 3, 4), True)
    assert draft.logprobs == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    shorter = behind(drafts, PROMPT, limit=3)
    assert shorter is not None
    assert (shorter.tokens, shorter.ends) == ((1, 2, 3), False)


def test_a_sample_is_never_its_own_draft_and_siblings_are_where_they_may_be():
    drafts = Drafts(LOTS)
    add(drafts, GROUP, 0, [1, 2, 3, 4])
    assert behind(drafts, PROMPT, session=f"{GROUP}/0") is None
    assert behind(drafts, PROMPT, session=f"{GROUP}/1") is not None
    drafts.siblings = False
    assert behind(drafts, PROMPT, session=f"{GROUP}/1") is None


def test_answers_of_other_groups_count_from_finished_steps_alone():
    drafts = Drafts(LOTS)
    add(drafts, "0/p", 3, [1, 2, 3, 4], version=5)
    assert behind(drafts, PROMPT, version=5) is None
    assert behind(drafts, PROMPT, version=6) is not None


def test_behind_a_rejected_token_another_answer_with_the_same_end_goes_on():
    drafts = Drafts(LOTS)
    add(drafts, "0/p", 0, [1, 2, 3, 4, 50, 51])
    add(drafts, "0/p", 1, [7, 7, 1, 2, 3, 9, 60, 61])
    draft = behind(drafts, [*PROMPT, 1, 2, 3, 9])
    assert draft is not None
    assert draft.tokens == (60, 61)


def test_of_equally_good_answers_most_decide_how_it_goes_on_and_among_these_the_newest():
    drafts = Drafts(LOTS)
    for number, (tokens, version) in enumerate([([1, 5, 6], 4), ([1, 2, 3], 1), ([1, 2, 4], 2), ([8, 8, 8], 4)]):
        add(drafts, "0/p", number, tokens, version)
    draft = behind(drafts, PROMPT)
    assert draft is not None
    assert draft.tokens == (1, 2, 4)


def test_the_own_old_answer_is_a_draft_while_the_new_one_has_been_the_same():
    drafts = Drafts(LOTS)
    add(drafts, "0/p", 0, [1, 2, 3, 4], stopped=True)
    add(drafts, "0/p", 1, [5, 6])

    def again(context: list[int], version: int = 5):
        return drafts.again(GROUP, f"{GROUP}/0", context, 64, version)

    whole, rest = again(PROMPT), again([*PROMPT, 1, 2])
    assert whole is not None
    assert rest is not None
    assert (whole.tokens, rest.tokens, rest.ends) == ((1, 2, 3, 4), (3, 4), True)
    assert rest.logprobs == pytest.approx([-0.3, -0.4])
    assert again([*PROMPT, 1, 3]) is None
    assert again([*PROMPT, 1, 2, 3, 4]) is None
    assert again(PROMPT, version=0) is None


def test_a_sample_that_goes_on_in_parts_with_what_a_tool_said_in_between_is_one_answer():
    drafts = Drafts(LOTS)
    add(drafts, "0/p", 0, [1, 2])
    add(drafts, "0/p", 0, [3], context=[*PROMPT, 1, 2, 40, 41])
    draft = behind(drafts, PROMPT)
    assert draft is not None
    assert draft.tokens == (1, 2, 40, 41, 3)


def test_a_sample_that_begins_anew_after_a_restart_replaces_what_it_was():
    drafts = Drafts(LOTS)
    add(drafts, "0/p", 0, [1, 2, 3])
    add(drafts, "0/p", 0, [4, 5])
    draft = behind(drafts, PROMPT)
    assert draft is not None
    assert draft.tokens == (4, 5)
    assert drafts.tokens == MATCH + 2


def test_memory_is_bounded_and_prompts_answered_longest_ago_go_first():
    drafts = Drafts(max_tokens=100)
    for number in range(50):
        add(drafts, f"0/p{number}", 0, [1] * 10)
        assert drafts.tokens <= 100
        assert drafts.tokens == sum(len(answer.tokens) for answer in drafts.answers())
    assert [answer.group for answer in drafts.answers()] == [f"0/p{number}" for number in range(43, 50)]
    assert drafts.evicted == 43


def test_of_a_prompt_the_two_newest_groups_stay():
    drafts = Drafts(LOTS)
    for epoch in (0, 1, 2):
        add(drafts, f"{epoch}/p", 0, [1, 2])
    add(drafts, "0/p", 1, [1, 2])
    assert {answer.group for answer in drafts.answers()} == {"1/p", "2/p"}


sequences = st.lists(st.integers(0, 2), min_size=0, max_size=30)


@given(st.lists(sequences, min_size=1, max_size=4), sequences)
def test_the_draft_follows_the_longest_common_end_that_there_is(answers: list[list[int]], tail: list[int]):
    """Against a comparison of the context with every place of every answer."""
    drafts = Drafts(LOTS)
    context = [*PROMPT, *tail]
    for number, tokens in enumerate(answers):
        add(drafts, "0/p", number, tokens)

    def common(have: list[int]) -> int:
        pairs = zip(reversed(have), reversed(context[-LONGEST_MATCH:]), strict=False)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(have), len(context)))

    kept = [[*PROMPT[-MATCH:], *tokens] for tokens in answers]
    places = [(common(have[:at]), have[at:]) for have in kept for at in range(MATCH, len(have))]
    longest = max((length for length, _ in places), default=0)
    draft = behind(drafts, context)
    if longest < MATCH:
        assert draft is None
        return
    assert draft is not None
    # of many places with one end the newest few of each answer are looked at
    assert list(draft.tokens) in [rest for length, rest in places if length >= MATCH]
    if len(places) <= 8:
        assert list(draft.tokens) in [rest for length, rest in places if length == longest]


def test_answers_outlive_a_restart_and_what_is_added_later_changes_no_file(tmp_path):
    drafts, file = Drafts(LOTS), DraftsFile(tmp_path, keep=2)
    add(drafts, "0/p", 0, [1, 2, 3], version=3, stopped=True)
    add(drafts, "0/q", 1, [4, 5])
    saved = drafts.answers()
    add(drafts, "0/q", 1, [6], context=[*PROMPT, 4, 5])
    file.write(7, saved)
    restored = Drafts(LOTS)
    restored.restore(file.read(7))
    assert restored.tokens == sum(len(answer.tokens) for answer in saved)
    for group, tokens, ends in (("1/p", (1, 2, 3), True), ("1/q", (4, 5), False)):
        draft = restored.behind(group, f"{group}/9", PROMPT, 64, 5)
        assert draft is not None
        assert (draft.tokens, draft.ends) == (tokens, ends)
    add(restored, "0/q", 1, [6], context=[*PROMPT, 4, 5])
    draft = restored.behind("1/q", "1/q/9", PROMPT, 64, 5)
    assert draft is not None
    assert draft.tokens == (4, 5, 6)


def test_c2_a_damaged_or_missing_file_is_warned_of_and_costs_the_drafts_alone(tmp_path, caplog):
    """Faults: a flipped bit, a cut file, no file, a directory that cannot be written."""
    drafts, file = Drafts(LOTS), DraftsFile(tmp_path, keep=3)
    add(drafts, "0/p", 0, list(range(50)))
    file.write(1, drafts.answers())
    path = tmp_path / "drafts" / "step-1"
    whole = path.read_bytes()
    for damaged in (whole[:30] + bytes([whole[30] ^ 1]) + whole[31:], whole[:-5], b""):
        path.write_bytes(damaged)
        assert file.read(1) == []
    assert file.read(2) == []
    assert caplog.text.count("going on without drafts") == 4
    (tmp_path / "in_the_way").write_text("")
    DraftsFile(tmp_path / "in_the_way", keep=3).write(1, drafts.answers())
    assert "not kept" in caplog.text


def test_files_of_the_last_checkpoints_stay_and_no_others(tmp_path):
    file = DraftsFile(tmp_path, keep=2)
    for step in (9, 10, 11):
        file.write(step, [])
    assert sorted(path.name for path in (tmp_path / "drafts").iterdir()) == ["step-10", "step-11"]
    file.write(10, [])  # gone on from an earlier checkpoint
    assert sorted(path.name for path in (tmp_path / "drafts").iterdir()) == ["step-10"]


def test_the_one_of_many_long_answers_that_has_the_context_is_found_in_its_middle():
    source = np.random.default_rng(0)
    drafts = Drafts(LOTS)
    for number in range(16):
        add(drafts, "0/p", number, source.integers(0, 50_000, 4096).tolist())
    answers = drafts.answers()
    context = [*PROMPT, *answers[7].tokens[1000:1100].tolist()]
    draft = behind(drafts, context)
    assert draft is not None
    assert draft.tokens[0] == int(answers[7].tokens[1100])
