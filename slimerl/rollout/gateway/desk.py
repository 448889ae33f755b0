"""What a request asks for, put into its place in a session, and what came of it, recorded there.

Flows in: checked bodies, the name of a session. Flows out: `Order`s; `fill` has them sampled.
Invariant: text of a client becomes token ids once, where it is new; what stands before it in the session is taken as it
stands there.
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import msgspec

from slimerl.rollout.gateway.answers import Answer, ChatShape, CompletionShape, GenerateShape, Shape
from slimerl.rollout.gateway.conversation import Message, digests, frame_digest, read_messages
from slimerl.rollout.gateway.errors import ApiError, refused
from slimerl.rollout.gateway.external import ExternalAgents, Task
from slimerl.rollout.gateway.openings import Openings
from slimerl.rollout.gateway.replies import Piece, Reply
from slimerl.rollout.gateway.requests import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    Wanted,
    read_chat,
    read_completion,
    read_generate,
)
from slimerl.rollout.gateway.sampler import Place, Told, TurnSampler
from slimerl.rollout.gateway.sessions import Session, Turn
from slimerl.rollout.gateway.text import ModelText
from slimerl.samples.written_ids import WrittenIds, read, written

_GENERATE = GenerateShape()


class Order(msgspec.Struct, frozen=True):
    """A turn to be sampled. `tell`: notes in the session what the client was told."""

    place: Place
    answer: Answer
    shape: Shape
    tell: Callable[[Turn], None]


@dataclass
class Desk:
    """`temperature`: of the run; `model`: its name."""

    external: ExternalAgents
    sampler: TurnSampler
    text: ModelText
    temperature: float
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    _numbers: "count[int]" = field(default_factory=count)
    _openings: Openings = field(default_factory=Openings)

    async def chat(self, name: str, body: ChatBody) -> Order:
        """Raises ApiError, ConversationError, TemplateError, SessionError."""
        wanted = read_chat(body, self.temperature)
        frame = self.text.frame
        if frame is None:
            raise refused("the model has no chat template; use /v1/completions", "messages", "no_chat_template")
        messages = read_messages(body.messages)
        tools = body.tools if body.tool_choice != "none" else None
        options = body.chat_template_kwargs or {}
        asked = digests(messages, frame_digest(tools, options))
        session, task = self._session(name)
        parent, covered = session.match(asked)
        observed = session.observed_before(parent, asked[-1])
        if observed is None:
            if parent is None:
                new = frame.opening(messages, tools, options)
            else:
                last = parent.tokens[-1] if parent.tokens else None
                new = frame.following(messages[covered - 1], messages[covered:], options, last)
            observed = await self._encoded(new, special=False)
        answer = self._answer("chatcmpl", wanted, None, f"call_{session.session_id}_", bool(tools))

        def tell(turn: Turn) -> None:
            told: list[Message] = read_messages([answer.message()])
            session.tell(turn, digests(told, asked[-1])[0])

        place = Place(session, task, parent, observed, asked[-1])
        return Order(place, answer, ChatShape(self.text.spelt), tell)

    async def completion(self, name: str, body: CompletionBody) -> Order:
        """Raises ApiError, SessionError."""
        wanted, prompt = read_completion(body, self.temperature)
        return await self._flat(name, wanted, prompt, "cmpl", CompletionShape(self.text.spelt))

    async def generate(self, name: str, body: GenerateBody) -> Order:
        """Raises ApiError, SessionError."""
        wanted, prompt = read_generate(body, self.temperature)
        return await self._flat(name, wanted, prompt, "gen", _GENERATE, body.rid)

    def generate_from(self, name: str, body: GenerateBody, ids: bytes) -> Order:
        """`ids`: of the prompt, which the body does not have (`cut_generate`).

        Raises:
            ApiError, SessionError.
            NotPlain: `ids` are not ids alone.
        """
        wanted, _ = read_generate(body, self.temperature)
        return self._of_ids(name, wanted, ids, "gen", _GENERATE, body.rid)

    async def _flat(
        self,
        name: str,
        wanted: Wanted,
        prompt: str | list[int],
        kind: str,
        shape: Shape,
        answer_id: str | None = None,
    ) -> Order:
        """`prompt`: text or ids."""
        if not isinstance(prompt, str):
            return self._of_ids(name, wanted, written(prompt), kind, shape, answer_id)
        if not prompt:
            raise refused("the prompt is empty", "prompt")
        session, task = self._session(name)
        parent, covered = session.match_flat(prompt)
        observed = await self._encoded(prompt[covered:], special=parent is None)
        answer = self._answer(kind, wanted, answer_id)

        def tell(turn: Turn) -> None:
            session.tell_flat(turn, prompt, answer.reply.decoded)

        return Order(Place(session, task, parent, observed, b""), answer, shape, tell)

    def _of_ids(
        self, name: str, wanted: Wanted, prompt: bytes, kind: str, shape: Shape, answer_id: str | None
    ) -> Order:
        """`prompt`: written ids. Raises NotPlain: it is none."""
        if not prompt:
            raise refused("the prompt is empty", "prompt")
        session, task = self._session(name)
        parent, covered = session.match_flat(prompt)
        if parent is None:
            context = self._openings.read(prompt)
            observed = context.packed
        else:
            observed = read(prompt[covered:])
            context = WrittenIds(prompt, parent.packed() + observed)
        answer = self._answer(kind, wanted, answer_id)
        answer.reply.trusts_text = shape is _GENERATE and not (wanted.stops or wanted.stream)

        def tell(turn: Turn) -> None:
            session.tell_flat(turn, prompt, answer.written_tokens())

        return Order(Place(session, task, parent, observed, b"", context), answer, shape, tell)

    async def fill(self, order: Order, told: Told) -> list[Piece]:
        """Have an order sampled and recorded; what of the reply was not told until then.

        Args:
            told: called whenever the answer has grown, if the client reads along.

        Raises:
            ApiError, GenerationFailed, SessionError: see `TurnSampler.sample`; nothing is recorded then.
        """
        answer = order.answer
        try:
            turn = await self.sampler.sample(order.place, answer.wanted, answer, told)
        finally:
            if order.place.task is not None:
                order.place.task.heard_s = self.external.clock()
        rest = answer.reply.end()
        order.tell(turn)
        if answer.reply.malformed_call:
            self.external.counts["malformed_calls"] += 1
        return rest

    def _session(self, name: str) -> tuple[Session, Task | None]:
        if not name:
            return Session(f"request-{next(self._numbers)}"), None
        task = self.external.heard(name)
        if task is not None:
            return task.session, task
        sessions = self.external.sessions
        if sessions.is_full():
            raise ApiError(429, "too_many_tokens", "open sessions have all the tokens that there may be; finish some")
        return sessions.use(name), None

    def _answer(
        self, kind: str, wanted: Wanted, answer_id: str | None, call_prefix: str = "", reads_calls: bool = False
    ) -> Answer:
        number = next(self._numbers)
        step = self.text.steps() if wanted.stream else None
        reply = Reply(self.text.decode, wanted.stops, reads_calls, f"{call_prefix}{number}_", step)
        return Answer(answer_id or f"{kind}-{number}", int(time.time()), wanted.model or self.model, wanted, reply)

    async def _encoded(self, text: str, special: bool) -> "array[int]":
        if not self.text.takes_long(text):
            return array("i", self.text.encode(text, special))
        return array("i", await asyncio.to_thread(self.text.encode, text, special))
