"""Rewards over HTTP against a real service that hangs, drops connections and answers nonsense."""

import asyncio
import os
import socket
import time
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from judging_service import judging_service

from slimerl.rewards.breaker import Breaker
from slimerl.rewards.build import build_reward
from slimerl.rewards.outcome import Failed, RewardRequest, RewardUnavailable, Scored, Unparsable
from slimerl.spec.reward import HttpReward

REQUEST = RewardRequest("0/a/1", "4", "4", "2+2=")


@asynccontextmanager
async def scorer(url: str, **options):
    made = build_reward(HttpReward(kind="http", url=url, **{"timeout_s": 5.0, **options}))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def judged(behaviour: str, **options):
    """(outcome, requests that the service got, events, seconds)."""

    async def scene():
        async with judging_service() as service, scorer(f"{service.url}/{behaviour}", **options) as reward:
            begun = time.monotonic()
            outcome = await reward.score(REQUEST)
            return outcome, service.calls[behaviour], reward.take_events(), time.monotonic() - begun

    return asyncio.run(scene())


def test_r2_a_verdict_arrives_as_the_service_gave_it():
    assert judged("right")[:2] == (Scored(0.75, True), 1)
    assert judged("unparsable")[:2] == (Unparsable(), 1)


def test_the_service_gets_prompt_response_and_answer_and_the_token(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")

    async def scene():
        async with judging_service() as service, scorer(f"{service.url}/right", token_variable="JUDGE_TOKEN") as reward:
            await reward.score(REQUEST)
            return service.bodies, service.tokens

    body = {"sample_id": "0/a/1", "prompt": "2+2=", "response": "4", "answer": "4"}
    assert asyncio.run(scene()) == ([body], ["Bearer secret"])


def test_a_token_that_is_not_there_is_said_at_the_start(monkeypatch):
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(RewardUnavailable, match="JUDGE_TOKEN"):
        asyncio.run(build_reward(HttpReward(kind="http", url="http://h", token_variable="JUDGE_TOKEN")).start())


@pytest.mark.parametrize("behaviour", ["hangs", "late", "trickles"])
def test_r1_a_service_that_does_not_answer_in_time_is_a_timeout(behaviour):
    """Faults: it never answers, too late, or a byte at a time. It is not asked again: the time is over."""
    outcome, calls, _, seconds = judged(behaviour, timeout_s=0.4)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, calls) == ("timeout", 1)
    assert seconds < 0.9


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("garbage", "garbled"),
        ("wrong_type", "garbled"),
        ("half", "garbled"),
        ("floods", "garbled"),
        ("not_finite", "garbled"),
        ("refuses", "refused"),
        ("elsewhere", "refused"),
    ],
)
def test_r2_an_answer_that_cannot_be_used_is_a_failure_and_not_asked_for_again(behaviour, reason):
    """Faults: bytes that are no JSON, wrong types, a missing key, an endless body, refusals, a redirection."""
    outcome, calls, events, _ = judged(behaviour)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, calls, +events) == (reason, 1, Counter())


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("fails", "server_error"), ("busy", "busy"), ("drops", "disconnected"), ("breaks", "disconnected")],
)
def test_r1_what_may_pass_is_tried_again_and_then_a_failure_by_name(behaviour, reason):
    """Faults: status 500 and 429, a connection dropped before and in the middle of the answer."""
    outcome, calls, events, _ = judged(behaviour)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, calls) == (reason, 3)
    assert (events["request_retried"], events[f"request_retried_{reason}"]) == (2, 2)


def test_r1_nobody_listening_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/right"

    async def scene():
        async with scorer(url) as reward:
            return await reward.score(REQUEST)

    assert asyncio.run(scene()).reason == "unreachable"


def test_a_service_that_recovers_is_no_failure():
    outcome, calls, events, _ = judged("recovers")
    assert (outcome, calls, events["request_retried_server_error"]) == (Scored(0.75, True), 3, 2)


def test_no_more_requests_are_under_way_than_allowed():
    async def scene():
        async with judging_service() as service, scorer(f"{service.url}/brief", concurrency=3) as reward:
            outcomes = await asyncio.gather(*(reward.score(REQUEST) for _ in range(12)))
            assert outcomes == [Scored(0.75, True)] * 12
            return service.most_running

    assert asyncio.run(scene()) == 3


def test_a6_a_cancelled_request_gives_its_slot_back():
    """Fault: callers cancelled while the service hangs, before and after they have a slot."""

    async def scene():
        async with judging_service() as service, scorer(f"{service.url}/hangs", concurrency=2) as reward:
            tasks = [asyncio.ensure_future(reward.score(REQUEST)) for _ in range(5)]
            while service.running < 2:
                await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            reward.remote.url = f"{service.url}/right"
            async with asyncio.timeout(2):
                return await asyncio.gather(*(reward.score(REQUEST) for _ in range(4)))

    assert asyncio.run(scene()) == [Scored(0.75, True)] * 4


# --- the circuit breaker


def test_r1_an_open_circuit_spares_the_service_and_keeps_the_samples():
    """Fault: 503 for a while. Once open, one probe at a time goes out; when it succeeds all who waited are judged."""

    async def scene():
        async with judging_service() as service, scorer(f"{service.url}/ailing", timeout_s=20.0) as reward:
            reward.remote.breaker = Breaker(failures_to_open=4, cool_down_s=0.1)
            tasks = [asyncio.ensure_future(reward.score(REQUEST)) for _ in range(10)]
            while not reward.remote.breaker.is_open or service.running:
                await asyncio.sleep(0.005)
            opened_after, service.most_running = service.calls["ailing"], 0
            while service.calls["ailing"] < opened_after + 2:
                await asyncio.sleep(0.005)
            assert service.most_running == 1
            service.healthy = True
            return await asyncio.gather(*tasks), reward.take_events()

    outcomes, events = asyncio.run(scene())
    reasons = Counter(outcome.reason if isinstance(outcome, Failed) else "judged" for outcome in outcomes)
    assert reasons["judged"] >= 8, reasons
    assert set(reasons) <= {"judged", "server_error"}
    assert events["circuit_opened"] == 1


def test_r1_a_circuit_that_stays_open_fails_by_its_own_name():
    """Fault: the service never recovers; who waits for the circuit fails as that, at the deadline."""

    async def scene():
        async with judging_service() as service, scorer(f"{service.url}/ailing", timeout_s=0.6) as reward:
            reward.remote.breaker = Breaker(failures_to_open=1, cool_down_s=60.0)
            outcomes = [await reward.score(REQUEST) for _ in range(2)]
            return outcomes, service.calls["ailing"], reward.take_events()

    outcomes, calls, events = asyncio.run(scene())
    assert [outcome.reason for outcome in outcomes] == ["circuit_open", "circuit_open"]
    assert (calls, events["circuit_opened"]) == (1, 1)


def test_a_breaker_opens_after_failures_in_a_row_and_probes_alone():
    breaker = Breaker(failures_to_open=3, cool_down_s=10.0)
    for now in (0.0, 1.0):
        assert breaker.admit(now)
        breaker.failed(now, probe=False)
    assert breaker.admit(2.0)
    breaker.succeeded()
    for now in (3.0, 4.0, 5.0):
        assert breaker.admit(now)
        breaker.failed(now, probe=False)
    assert (breaker.is_open, breaker.opened) == (True, 1)
    assert not breaker.admit(14.9)
    assert breaker.wait_s(14.0) == pytest.approx(1.0)
    assert breaker.admit(15.0)
    assert not breaker.admit(15.1), "one probe at a time"
    assert breaker.wait_s(15.1) is None
    breaker.abandoned(probe=True)
    assert breaker.admit(15.2)
    breaker.failed(15.25, probe=False)
    assert not breaker.admit(15.26), "a request from before the circuit opened ends no probe"
    breaker.failed(15.3, probe=True)
    assert (breaker.admit(20.0), breaker.opened) == (False, 1)
    assert breaker.admit(25.4)
    breaker.succeeded()
    assert not breaker.is_open


def test_many_requests_leave_no_descriptor():
    async def scene():
        async with judging_service() as service:
            for behaviour in ("right", "drops", "fails", "hangs"):
                async with scorer(f"{service.url}/{behaviour}", timeout_s=0.3, concurrency=4) as reward:
                    await asyncio.gather(*(reward.score(REQUEST) for _ in range(8)))
            begun = len(os.listdir("/proc/self/fd"))
            for _ in range(5):
                async with scorer(f"{service.url}/right") as reward:
                    await asyncio.gather(*(reward.score(REQUEST) for _ in range(8)))
            await asyncio.sleep(0)
            return begun, len(os.listdir("/proc/self/fd"))

    before, after = asyncio.run(scene())
    assert after <= before
