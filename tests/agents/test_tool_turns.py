"""Turns with tools, one sample at a time: what it holds, what engines see, how it ends, how it goes on."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from talker import PROMPT, STOP, HereToolbox, Talker, new_sample, policy_of, talk, tokens_of, tool_loop

from slimerl.rewards.outcome import Failed, Outcome, Unparsable
from slimerl.rollout.agents.loop import AgentFailed
from slimerl.rollout.agents.policy import Policy, PolicyError, Watcher
from slimerl.rollout.agents.turns import last_said, turns_of
from slimerl.rollout.prompts import Prompt
from slimerl.samples.sample import OBSERVED_VERSION, Sample

ASKED = Prompt("p", PROMPT, "")


def run(policy: Policy, loop=None) -> Outcome | None:
    async def made() -> Outcome | None:
        agent = loop or tool_loop()
        try:
            outcome = await agent(policy, policy.sample, ASKED)
        finally:
            agent.texts.close()
        policy.close()
        return outcome

    return asyncio.run(made())


def whole(turns: int = 2) -> Sample:
    sample = new_sample()
    assert run(policy_of(sample, Talker(lambda tokens, seed: talk(tokens, seed, turns)))) is None
    return sample


def test_what_a_tool_answers_is_observed_and_what_the_policy_says_is_sampled():
    sample = whole()
    call, answer = turns_of(sample)
    assert bytes(call.sampled[:-1]).startswith(b"calc(7*")
    product = str(eval(bytes(call.sampled[5:-3]).decode()))
    assert call.observed == tuple(tokens_of(f"{product}\n"))
    assert answer.sampled == (*tokens_of(product), STOP)
    assert sample.finish_reason == "stop"
    assert last_said(sample) == list(answer.sampled)
    for token, sampled, logprob, version in zip(
        sample.response_tokens, sample.sampled, sample.behavior_logprobs, sample.versions, strict=True
    ):
        assert (logprob, version) == ((-token / 1000, 0) if sampled else (0.0, OBSERVED_VERSION))


def test_m6_each_request_begins_with_all_tokens_of_the_one_before():
    talker = Talker(lambda tokens, seed: talk(tokens, seed, turns=3), most=4)
    sample = new_sample()
    run(policy_of(sample, talker))
    assert len(talker.requests) > 6
    for before, after in pairwise(talker.requests):
        assert after.tokens[: len(before.tokens)] == before.tokens
        assert after.session == before.session
        assert after.params.seed == before.params.seed
    assert tuple(sample.tokens)[: len(talker.requests[-1].tokens)] == talker.requests[-1].tokens


@settings(max_examples=60, deadline=None)
@given(most=st.integers(1, 12), chunk=st.none() | st.integers(1, 12), turns=st.integers(2, 4))
def test_a_turn_that_is_interrupted_goes_on_where_it_was(most, chunk, turns):
    sample = new_sample()
    run(policy_of(sample, Talker(lambda tokens, seed: talk(tokens, seed, turns), most), chunk=chunk))
    assert sample == whole(turns)


def test_c1_a_sample_restored_anywhere_in_a_conversation_ends_as_without_the_restart():
    """Injected: the process ends after each token; before and after the tool has answered."""
    expected = whole(turns=3)
    length = len(expected.response_tokens)
    for kept in range(length + 1):
        sample = new_sample()
        for place in range(kept):
            token = [expected.response_tokens[place]]
            if expected.sampled[place]:
                sample.append(token, [expected.behavior_logprobs[place]], 0)
            else:
                sample.append(token)
        ended = kept and expected.sampled[kept - 1] and expected.response_tokens[kept - 1] == STOP
        sample.finish_reason = "stop" if ended else None
        if kept and not expected.sampled[kept - 1] and kept < length and not expected.sampled[kept]:
            continue  # what is observed is appended as a whole
        restored = Sample.restored(sample.saved(), "g")
        run(policy_of(restored, Talker(lambda tokens, seed: talk(tokens, seed, turns=3))))
        assert restored.tokens == expected.tokens, kept
        assert restored.sampled == expected.sampled
        assert restored.finish_reason == "stop"


@settings(max_examples=80, deadline=None)
@given(budget=st.integers(1, 60), chunk=st.none() | st.integers(1, 9), turns=st.integers(2, 4))
def test_a7_sampled_and_observed_tokens_together_keep_the_budget(budget, chunk, turns):
    talker = Talker(lambda tokens, seed: talk(tokens, seed, turns))
    sample = new_sample()
    outcome = run(policy_of(sample, talker, budget, chunk))
    expected = whole(turns)
    assert len(sample.response_tokens) <= budget
    assert sample.response_tokens == expected.response_tokens[: len(sample.response_tokens)]
    if sample.finish_reason == "observation_length":
        assert outcome == Unparsable()
        assert sample.response_tokens[-1] == STOP
        place = len(turns_of(sample)) - 1
        assert len(sample.response_tokens) + len(turns_of(expected)[place].observed) >= budget
    else:
        assert outcome is None
        assert sample.finish_reason == "stop" or len(sample.response_tokens) == budget
    for request in talker.requests:
        assert len(request.tokens) - len(PROMPT) + request.params.max_new_tokens <= budget


def test_a_sample_that_still_calls_in_its_last_turn_holds_no_answer():
    sample = new_sample()
    endless = Talker(lambda tokens, seed: talk(tokens, seed, turns=9))
    assert run(policy_of(sample, endless), tool_loop(max_turns=3)) == Unparsable()
    assert sample.finish_reason == "turns"
    assert len(turns_of(sample)) == 3
    assert run(policy_of(sample, endless), tool_loop(max_turns=3)) == Unparsable(), "also after a restart"


def test_a_wrong_call_is_told_to_the_policy_and_a_broken_tool_drops_the_sample():
    said = {0: "lookup(7)=", 1: "calc(7/0)=", 2: "none"}

    def say(tokens, seed):
        return [*tokens_of(said[bytes(tokens[2:]).count(b"\n")]), STOP]

    class Counting(Watcher):
        def counted(self, name):
            counts[name] += 1

    counts: Counter[str] = Counter()
    sample = new_sample()
    run(replace(policy_of(sample, Talker(say)), watcher=Counting()))
    assert counts == {
        "tool_calls": 2,
        "tool_failures": 2,
        "tool_failures_unknown_tool": 1,
        "tool_failures_arithmetic": 1,
    }
    first, second, _ = turns_of(sample)
    assert b"there is no tool" in bytes(first.observed)
    assert b"division by zero" in bytes(second.observed)
    broken = HereToolbox(iter([Failed("timeout", "no answer within 1 s")]))
    with pytest.raises(AgentFailed, match="no answer within 1 s") as caught:
        run(policy_of(new_sample(), Talker(say)), tool_loop(broken))
    assert caught.value.reason == "tool_timeout"


def test_a_loop_can_neither_invent_sampled_tokens_nor_change_what_engines_saw():
    async def invents(policy, sample, prompt):
        await policy.turn()
        sample.append([5, 6], [-0.1, -0.1], 0)

    async def rewrites(policy, sample, prompt):
        await policy.turn()
        policy.observe([9])
        sample.response_tokens[0] += 1
        await policy.turn()

    async def stops_early(policy, sample, prompt):
        policy.observe([9])

    async def sees_nothing(policy, sample, prompt):
        await policy.turn()
        policy.observe([])

    async def interrupts(policy, sample, prompt):
        sample.append([5], [-0.1], 0)
        policy.observe([9])

    faults = {
        invents: "marked as sampled",
        rewrites: "were changed",
        stops_early: "has not ended",
        sees_nothing: "nothing was observed",
        interrupts: "in the middle of a turn",
    }

    async def made(loop):
        policy = policy_of(new_sample(), Talker(lambda tokens, seed: [5, 6, STOP]))
        await loop(policy, policy.sample, ASKED)
        policy.close()

    for loop, message in faults.items():
        with pytest.raises(PolicyError, match=message):
            asyncio.run(made(loop))


def test_a_turn_may_be_given_fewer_tokens_than_are_left():
    async def made():
        policy = policy_of(new_sample(), Talker(lambda tokens, seed: [*range(20, 30), STOP][len(tokens) - 2 :], most=3))
        assert await policy.turn(max_tokens=5) == "length"
        assert policy.sample.response_tokens == [20, 21, 22, 23, 24]
        assert policy.left == 95
        assert await policy.turn(max_tokens=5) == "length", "it has ended"
        policy.close()

    asyncio.run(made())
