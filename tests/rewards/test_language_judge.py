"""A language model as judge: votes in shuffled order, read strictly, against a service and a real engine."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from judging_service import JudgingService, judging_service, letter_of

from slimerl.rewards.build import build_reward
from slimerl.rewards.language_judge import chosen, judge_prompt, rubric_fault, vote_order
from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored
from slimerl.spec.reward import JudgeReward

REQUEST = RewardRequest("0/a/1", "the {answer} is four", "4", "2+2=")
GRADES = ["correct", "partly", "incorrect"]


@pytest.fixture
def rubric(tmp_path):
    path = tmp_path / "rubric.txt"
    path.write_text("Question: {prompt}\nReference: {answer}\nResponse: {response}\nIs it {right}?")
    return path


@asynccontextmanager
async def judge(url: str, rubric, **options):
    made = build_reward(JudgeReward(kind="judge", url=url, rubric_path=rubric, **{"timeout_s": 20.0, **options}))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def judged(rubric, says, **options) -> tuple[Outcome, JudgingService, Counter]:
    """What comes of a judge that answers `says(prompt)`."""

    async def scene():
        async with judging_service() as service, judge(service.url, rubric, **options) as reward:
            service.votes = says
            return await reward.score(REQUEST), service, reward.take_events()

    return asyncio.run(scene())


def test_the_reward_is_the_mean_of_the_votes(rubric):
    answers = iter(["correct", "correct", "incorrect"])
    outcome, service, _ = judged(rubric, lambda prompt: f"Well.\nGrade: {letter_of(prompt, next(answers))}", votes=3)
    assert outcome == Scored(pytest.approx(2 / 3), True)
    assert service.calls["v1_chat_completions"] == 3


@pytest.mark.parametrize(("grade", "outcome"), [("excellent", Scored(2.0, True)), ("poor", Scored(-1.0, False))])
def test_grades_and_their_rewards_are_the_specs(rubric, grade, outcome):
    options = {"grades": {"excellent": 2.0, "poor": -1.0}, "correct_from": 0.0, "votes": 1}
    assert judged(rubric, lambda prompt: f"Grade: {letter_of(prompt, grade)}", **options)[0] == outcome


def test_a_judge_that_likes_the_first_grade_decides_nothing(rubric):
    """Fault: a judge that answers A whatever it reads. Over as many votes as grades it gives each grade once."""
    outcome, _, _ = judged(rubric, lambda prompt: "Grade: A", votes=4)
    assert outcome == Scored(0.5, False)


def test_votes_are_in_other_orders_that_a_replay_repeats():
    firsts = Counter()
    for sample in range(300):
        orders = [vote_order(GRADES, f"s{sample}", vote) for vote in range(3)]
        assert orders == [vote_order(GRADES, f"s{sample}", vote) for vote in range(3)]
        assert {order[0] for order in orders} == set(GRADES)
        firsts[orders[0][0]] += 1
    assert min(firsts.values()) > 70


def test_each_request_has_a_seed_of_its_own_and_the_extra_fields(rubric):
    _, service, _ = judged(rubric, lambda prompt: "Grade: A", votes=2, extra_body={"top_k": 5}, model="grader")
    assert len({body["seed"] for body in service.bodies}) == 2
    assert all((body["top_k"], body["model"]) == (5, "grader") for body in service.bodies)


def test_braces_of_a_response_are_no_placeholders():
    prompt = judge_prompt("{prompt}|{response}|{answer}|{other}", REQUEST, GRADES)
    assert prompt.startswith("2+2=|the {answer} is four|4|{other}\n")


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("Grade: B", "partly"),
        ("I thought of Grade: A first.\n**Grade:** C", "incorrect"),
        ("grade - (a)", "correct"),
        ("Grade: D", None),
        ("The answer is right.", None),
        ("", None),
        ("Grade: Bad", None),
    ],
)
def test_only_a_grade_that_was_offered_is_read(text, grade):
    assert chosen(text, GRADES) == grade


def test_r2_votes_that_cannot_be_read_are_a_failure_and_no_grade(rubric):
    """Fault: the judge rambles. Two readable votes of four are enough, one is not."""
    for readable, wanted in ((2, Scored(1.0, True)), (1, "judge_unreadable"), (0, "judge_unreadable")):
        left = iter(range(4))
        outcome, _, events = judged(
            rubric,
            lambda prompt, left=left, readable=readable: (
                f"Grade: {letter_of(prompt, 'correct')}" if next(left) < readable else "I cannot say."
            ),
            votes=4,
        )
        assert (outcome.reason if isinstance(outcome, Failed) else outcome) == wanted
        assert events["vote_unreadable"] == 4 - readable


@pytest.mark.parametrize(
    ("path", "reason"),
    [("hangs", "timeout"), ("garbage", "garbled"), ("fails", "server_error"), ("drops", "disconnected")],
)
def test_r1_a_judge_that_fails_is_a_failure_by_name(rubric, path, reason):
    """Faults: its server hangs, answers nonsense, fails, drops the connection."""

    async def scene():
        async with judging_service() as service, judge(service.url, rubric, votes=2, timeout_s=3.0) as reward:
            reward.remote.url = f"{service.url}/{path}"
            return await reward.score(REQUEST), reward.take_events()

    outcome, events = asyncio.run(scene())
    assert outcome.reason == f"judge_{reason}"
    assert events[f"vote_{reason}"] == 2


@pytest.mark.parametrize(
    ("text", "fault"),
    [("Judge {answer}", "has no {response}"), ("{response} {reponse}", "has {reponse}, which nothing fills in")],
)
def test_a_rubric_that_cannot_work_is_refused(tmp_path, text, fault):
    path = tmp_path / "rubric.txt"
    path.write_text(text)
    assert fault in rubric_fault(path)
    assert "cannot be read" in rubric_fault(tmp_path / "absent.txt")


def test_a_real_engine_judges(engines, rubric, monkeypatch):
    """A random model held to the form of a verdict judges; left alone it rambles, which is a failure of that name."""
    engine = engines().info
    monkeypatch.setenv("JUDGE_KEY", engine.admin_key)
    options = {"token_variable": "JUDGE_KEY", "max_new_tokens": 16, "timeout_s": 120.0}
    held = options | {"extra_body": {"regex": "Grade: [AB]"}}

    async def scene():
        async with judge(engine.url, rubric, **held) as strict, judge(engine.url, rubric, **options) as loose:
            return await strict.score(REQUEST), await loose.score(REQUEST)

    strict, loose = asyncio.run(scene())
    assert isinstance(strict, Scored)
    assert strict.reward * 3 in (pytest.approx(number) for number in range(4))
    assert isinstance(loose, Failed)
    assert loose.reason == "judge_unreadable"
