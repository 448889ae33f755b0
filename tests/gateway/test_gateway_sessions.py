"""Sessions as trees of turns: whatever a client does, tokens stay what they were.

Property tests of the real matching, template and tree; the engine's part is played by the test.
"""

import asyncio
from array import array
from typing import Any

import pytest
from gateway_scene import END, model_text
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slimerl.engine.protocol import SamplingParams
from slimerl.rollout.gateway.branches import branch_sample
from slimerl.rollout.gateway.desk import Desk, Order
from slimerl.rollout.gateway.external import ExternalAgents
from slimerl.rollout.gateway.requests import ChatBody
from slimerl.rollout.gateway.sampler import TurnSampler
from slimerl.rollout.gateway.sessions import Session, SessionError, Sessions, Turn
from slimerl.rollout.parts import Parts

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {}}}]
WORDS = st.sampled_from(["a", "b", "two words", "", "é", "<think>x</think>y"])
ROLES = st.sampled_from(["user", "tool", "assistant", "system"])
NAME = "s"


def desk_of(sessions: Sessions) -> Desk:
    external = ExternalAgents(sessions, 60.0)
    sampler = TurnSampler(None, sessions, Parts(SamplingParams(1 << 20), 7), 1 << 20, 60.0)
    return Desk(external, sampler, model_text(), 1.0, "policy")


def placed(desk: Desk, name: str, messages: list[dict[str, Any]], tools: list | None) -> Order:
    return asyncio.run(desk.chat(name, ChatBody(messages=messages, tools=tools)))


class Conversations(RuleBasedStateMachine):
    """One session, several requests under way at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions()
        self.desk = desk_of(self.sessions)
        self.under_way: list[tuple[Order, Turn, list[dict[str, Any]], bool]] = []
        self.told: list[tuple[list[dict[str, Any]], bool, Turn]] = []
        """Whole conversations as a client has them, and the turn that ended them, in order."""
        self.asked: list[tuple[list[dict[str, Any]], bool]] = []
        self.given: dict[Turn, tuple[list[int], list[float], list[int]]] = {}
        self.abandoned = 0

    def _ask(self, messages: list[dict[str, Any]], tools: bool) -> None:
        order = placed(self.desk, NAME, messages, TOOLS if tools else None)
        expected = self._longest(messages, tools)
        assert order.place.parent is expected, (
            "it goes on with the longest conversation that was told, the latest of them"
        )
        turn = order.place.session.begin(order.place.parent, order.place.observed, order.place.asked)
        self.under_way.append((order, turn, messages, tools))
        self.asked.append((messages, tools))

    def _longest(self, messages: list[dict[str, Any]], tools: bool) -> Turn | None:
        """By comparing messages one by one."""
        best: tuple[int, Turn | None] = (0, None)
        for conversation, with_tools, turn in self.told:
            length = len(conversation)
            same = [plain(one) for one in messages[:length]] == [plain(one) for one in conversation]
            if with_tools == tools and length <= len(messages) and same and length >= best[0]:
                best = (length, turn)
        return best[1]

    @rule(text=WORDS, tools=st.booleans())
    def begin_anew(self, text: str, tools: bool) -> None:
        self._ask([{"role": "user", "content": text}], tools)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), new=st.lists(st.tuples(ROLES, WORDS), min_size=0, max_size=2))
    def go_on(self, data: st.DataObject, new: list[tuple[str, str]]) -> None:
        conversation, tools, _ = data.draw(st.sampled_from(self.told))
        self._ask(conversation + [{"role": role, "content": text} for role, text in new], tools)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        messages, tools = data.draw(st.sampled_from(self.asked))
        before = [turn for _, turn, same, with_tools in self.under_way if (same, with_tools) == (messages, tools)]
        self._ask(messages, tools)
        _, turn, *_ = self.under_way[-1]
        for other in before:
            if other.parent is turn.parent:
                assert other.observed == turn.observed

    @precondition(lambda self: self.told)
    @rule(data=st.data(), text=WORDS)
    def edit(self, data: st.DataObject, text: str) -> None:
        conversation, tools, _ = data.draw(st.sampled_from(self.told))
        place = data.draw(st.integers(0, len(conversation) - 1))
        edited = [dict(message) for message in conversation]
        edited[place] = {"role": edited[place]["role"], "content": text + "!"}
        self._ask([*edited, {"role": "user", "content": "on"}], tools)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), text=st.sampled_from(["yes", " spaces ", "<think>t</think>no"]), call=st.booleans())
    def answer(self, data: st.DataObject, text: str, call: bool) -> None:
        at = data.draw(st.integers(0, len(self.under_way) - 1))
        order, turn, messages, tools = self.under_way.pop(at)
        if call:
            text += '<tool_call>{"name": "calc", "arguments": {"x":  1}}</tool_call>'
        ended = data.draw(st.booleans())
        tokens = [*model_text().encode(text), *([END] if ended else [])]
        logprobs = [-(number + len(self.given)) / 7 for number in range(len(tokens))]
        versions = [len(self.given)] * len(tokens)
        order.answer.reply.take(tokens)
        order.place.session.complete(turn, tokens, logprobs, versions, "stop" if ended else "length")
        order.answer.reply.end()
        order.tell(turn)
        self.given[turn] = (tokens, logprobs, versions)
        # as clients do: JSON through and back, and the text without white space at its ends
        said = dict(order.answer.message())
        said["content"] = (said["content"] or "").strip() or None
        self.told.append(([*messages, said], tools, turn))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.under_way) - 1))
        order, turn, *_ = self.under_way.pop(at)
        order.place.session.abandon(turn)
        self.abandoned += 1

    @invariant()
    def tokens_are_what_they_were(self) -> None:
        session = self.sessions.get(NAME)
        if session is None:
            return
        assert session.under_way == len(self.under_way)
        assert set(session.turns) == set(self.given), "no turn is lost, and none that failed is kept"
        for turn in session.turns:
            tokens = self.given[turn][0]
            assert list(turn.tokens) == tokens
            before = turn.parent.context() + list(turn.parent.tokens) if turn.parent else []
            assert turn.context()[: len(before)] == before
            assert turn.length == len(turn.context()) + len(tokens)
            sample = branch_sample(turn, "x", "g", "p")
            assert sample.tokens == turn.context() + tokens
            of_path = [self.given[each] for each in turn.path()]
            sampled = [number for number, mark in enumerate(sample.sampled) if mark]
            assert [sample.response_tokens[number] for number in sampled] == [x for each in of_path for x in each[0]]
            assert [sample.behavior_logprobs[number] for number in sampled] == [x for each in of_path for x in each[1]]
            assert [sample.versions[number] for number in sampled] == [x for each in of_path for x in each[2]]

    @invariant()
    def all_branches_are_kept(self) -> None:
        session = self.sessions.get(NAME)
        if session is not None:
            covered = {turn for leaf in session.leaves() for turn in leaf.path()}
            assert covered == set(self.given)


def plain(message: dict[str, Any]) -> object:
    """What a person would compare."""
    content = message["content"] or ""
    if message["role"] == "assistant":
        content = content.strip()
    calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls") or ()]
    return message["role"], content, calls


TestConversations = Conversations.TestCase
TestConversations.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_m6_what_follows_a_reply_is_tokenised_for_that_reply_even_where_another_says_the_same():
    """Fault: the same reply twice, once ended by the model and once cut off: what is told is the same, the tokens are
    not."""
    desk, asked = desk_of(Sessions()), [{"role": "user", "content": "q"}]
    going_on = [*asked, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "on"}]
    following = []
    for tokens, reason in (([*model_text().encode("yes"), END], "stop"), (model_text().encode("yes"), "length")):
        order = placed(desk, NAME, asked, None)
        session, place = order.place.session, order.place
        turn = session.begin(place.parent, place.observed, place.asked)
        order.answer.reply.take(tokens)
        order.answer.reply.end()
        session.complete(turn, tokens, [0.0] * len(tokens), [0] * len(tokens), reason)
        order.tell(turn)
        next_place = placed(desk, NAME, going_on, None).place
        assert next_place.parent is turn
        session.abandon(session.begin(turn, next_place.observed, next_place.asked))
        following.append(next_place.observed)
    assert following[1] == array("i", [END]) + following[0]


def told(session: Session, asked: bytes, reply: bytes, parent: Turn | None = None, tokens: int = 2) -> Turn:
    turn = session.begin(parent, array("i", [1, 2]), asked)
    session.complete(turn, [3] * tokens, [-0.5] * tokens, [0] * tokens, "stop")
    session.tell(turn, reply)
    return turn


def test_m6_a_branch_is_what_its_prompt_and_its_turns_are_and_nothing_else():
    session = Session("s")
    first = told(session, b"a", b"b")
    second = told(session, b"c", b"d", first)
    other = told(session, b"e", b"f", first, tokens=9)
    assert session.leaves() == [second, other]
    assert session.branch("finished") is other
    told(session, b"g", b"h", second)
    assert session.branch("finished").parent is second
    assert session.branch("longest") is other


def test_a_table_of_sessions_forgets_who_idles_and_refuses_when_all_are_in_use():
    sessions = Sessions(max_sessions=3)
    for name in "abc":
        sessions.use(name)
    sessions.use("a")
    sessions.use("b").pinned = True
    sessions.use("d")
    assert [each.session_id for each in sessions] == ["a", "b", "d"], "c was used the longest ago"
    for each in sessions:
        each.under_way += 1
    with pytest.raises(SessionError, match="all 3 sessions are in use"):
        sessions.use("e")
    assert sessions.forgotten == 1


def test_tokens_of_all_sessions_are_bounded_and_those_in_use_stay():
    sessions = Sessions(max_tokens=100)
    pinned = sessions.use("pinned")
    pinned.pinned = True
    told(pinned, b"a", b"b", tokens=60)
    sessions.grown(pinned)
    for number in range(20):
        session = sessions.use(f"s{number}")
        told(session, b"a", b"b", tokens=8)
        sessions.grown(session)
        assert sessions.tokens == sum(each.tokens for each in sessions) <= 100
    assert [each.session_id for each in sessions] == ["pinned", "s17", "s18", "s19"]
    told(pinned, b"c", b"d", tokens=60)
    sessions.grown(pinned)
    assert sessions.is_full()
    sessions.close("pinned")
    assert not sessions.is_full()
    assert sessions.tokens == sum(each.tokens for each in sessions)


def test_a_session_has_so_many_turns_and_no_more(monkeypatch):
    monkeypatch.setattr("slimerl.rollout.gateway.sessions.MAX_TURNS", 3)
    session = Session("s")
    for number in range(3):
        told(session, b"a%d" % number, b"b%d" % number)
    with pytest.raises(SessionError, match="has had 3 turns; finish it"):
        session.begin(None, array("i"), b"x")


def test_completions_go_on_with_the_longest_that_was_told():
    session = Session("s")
    short = told(session, b"", b"-")
    long = told(session, b"", b"-", short)
    session.tell_flat(short, "one two")
    session.tell_flat(long, "one two three four")
    assert session.match_flat("one two three four five") == (long, 18)
    assert session.match_flat("one two thirteen") == (short, 7)
    assert session.match_flat("two") == (None, 0)
