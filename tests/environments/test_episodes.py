"""Environments in their workers: stepped together, repeatable, and each episode fails by its own fault alone."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimerl.environments.environment import Task
from slimerl.environments.episode_worker import Advance, Advanced, Episodes, NotRepeatable
from slimerl.environments.episodes import EpisodePool
from slimerl.environments.made import make_environment
from slimerl.rewards.outcome import Failed
from slimerl.spec.agent import EnvironmentAgent
from slimerl.spec.functions import CustomFunctionError


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


def ask(name: str, *actions: str, answer: str = "50") -> Advance:
    return Advance(name, Task("", answer, seed=3), actions)


def play(act: Callable[[EpisodePool], Coroutine[Any, Any, Any]], environment: str, **spec: Any) -> Any:
    agent = EnvironmentAgent(kind="environment", environment=environment, **{"timeout_s": 20.0, **spec})

    async def run() -> Any:
        pool = EpisodePool.of(agent)
        try:
            await pool.start()
            return await act(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_episodes_that_wait_at_the_same_time_are_reset_and_stepped_together():
    async def act(pool: EpisodePool) -> None:
        begun = await asyncio.gather(*(pool.advance(ask(f"e{number}")) for number in range(10)))
        assert [each.observations for each in begun] == [("reset 10",)] * 10
        stepped = await asyncio.gather(*(pool.advance(ask(f"e{number}", "go")) for number in range(10)))
        assert {each.observations[-1] for each in stepped} == {"step 10"}
        many = await asyncio.gather(*(pool.advance(ask(f"f{number}")) for number in range(70)))
        assert {each.observations[0] for each in many} == {"reset 64", "reset 6"}

    play(act, "foreign_tools:counter")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_episode_is_where_its_actions_lead_whatever_is_remembered(data):
    """Injected: memory for two episodes alone, so that most are begun anew again and again."""
    cramped = Episodes(make_environment("foreign_tools:guess", {}), most=2)
    actions: dict[str, list[str]] = {f"e{number}": [] for number in range(4)}
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.sets(st.sampled_from(sorted(actions)), min_size=1))
        for name in chosen:
            actions[name].append(str(data.draw(st.integers(0, 49))))
        asked = [ask(name, *actions[name]) for name in sorted(chosen)]
        for request, found in zip(asked, cramped.advance(asked), strict=True):
            fresh = Episodes(make_environment("foreign_tools:guess", {})).advance([request])[0]
            assert found.observations == fresh.observations[found.first :]
            assert (found.rewards, found.done, found.correct) == (fresh.rewards, fresh.done, fresh.correct)
            assert 0 <= found.first <= len(request.actions)


def test_only_new_observations_are_told_where_an_episode_is_remembered():
    episodes = Episodes(make_environment("foreign_tools:guess", {}))
    assert episodes.advance([ask("a")])[0] == Advanced(0, ("below 103",), (), False, None)
    (second,) = episodes.advance([ask("a", "10")])
    assert (second.first, second.observations) == (0, ("below 103", "higher"))
    (third,) = episodes.advance([ask("a", "10", "60")])
    assert (third.first, third.observations, third.rewards) == (1, ("higher", "lower"), (-0.1, -0.1))
    (other,) = episodes.advance([ask("a", "11", "60")])
    assert other.first == 0, "other actions than are remembered"
    (last,) = episodes.advance([ask("a", "11", "60", "50")])
    assert (last.done, last.rewards[-1]) == (True, 1.0)
    with pytest.raises(NotRepeatable):
        episodes.advance([ask("a", "50", "60")])


@pytest.mark.parametrize(
    ("action", "reason"), [("hang", "timeout"), ("die", "worker_died"), ("raise", "error")], ids=lambda each: each
)
def test_r1_an_episode_that_breaks_fails_alone_and_the_others_are_repeated(action, reason):
    async def act(pool: EpisodePool) -> None:
        names = [f"e{number}" for number in range(5)]
        await asyncio.gather(*(pool.advance(ask(name, "10")) for name in names))
        asked = [ask(name, "10", action if name == "e2" else "60") for name in names]
        found = await asyncio.gather(*(pool.advance(each) for each in asked))
        for name, result in zip(names, found, strict=True):
            if name == "e2":
                assert isinstance(result, Failed)
                assert result.reason == reason
            else:
                assert result.observations[-2:] == ("higher", "lower")
                assert result.rewards == (-0.1, -0.1)

    play(act, "foreign_tools:guess", timeout_s=3.0 if action == "hang" else 60.0)


def test_an_environment_that_loses_an_episode_is_told_of_it():
    async def act(pool: EpisodePool) -> Any:
        await pool.advance(ask("a"))
        return await pool.advance(ask("a", "go"))

    found = play(act, "foreign_tools:counter", options={"wrong_count": True})
    assert isinstance(found, Failed)
    assert "step must give one Step for each of 1 episodes" in found.detail


def test_a_pool_that_is_closed_leaves_nobody_waiting():
    async def act(pool: EpisodePool) -> Any:
        waiting = [asyncio.ensure_future(pool.advance(ask(f"e{n}", "hang" if n else "10"))) for n in range(3)]
        await asyncio.sleep(0.1)
        await pool.close()
        return await asyncio.wait_for(asyncio.gather(*waiting), 5)

    assert all(isinstance(each, Failed) for each in play(act, "foreign_tools:guess"))


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("foreign_tools:no_environment", {}, "made a int, which has no reset and step"),
        ("foreign_tools:nothing", {}, "cannot load foreign_tools:nothing"),
        ("foreign_tools:counter", {"size": 3}, "cannot be made from"),
        ("reasoning_gym", {"dataset": "leg_counting"}, "pip install reasoning-gym"),
        ("verifiers", {"environment": "x"}, "pip install 'verifiers"),
    ],
)
def test_an_environment_that_cannot_be_made_says_what_to_do(environment, options, message):
    with pytest.raises(CustomFunctionError, match=message):
        make_environment(environment, options)
