"""Answers in the shapes of OpenAI's and SGLang's APIs. Pure.

Flows in: a reply, its tokens and what engines said. Flows out: JSON bodies, whole or as events of a stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import msgspec

from slimerl.engine.protocol import Generation
from slimerl.rollout.gateway.conversation import Message
from slimerl.rollout.gateway.replies import Piece, Reply
from slimerl.rollout.gateway.requests import Wanted
from slimerl.samples.written_ids import written

DONE = b"data: [DONE]\n\n"
SPARSER = 64
"""SGLang's events come once their tokens have grown by this part: up to so many tokens one for each."""

encode = msgspec.json.Encoder().encode


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


class Answer(msgspec.Struct, eq=False):
    """One reply on its way to a client. `model`: as it is told."""

    answer_id: str
    created: int
    model: str
    wanted: Wanted
    reply: Reply
    prompt_tokens: int = 0
    parts: list[Generation] = msgspec.field(default_factory=list)
    """In the order in which they were told, or came."""
    finish_reason: str = ""
    told_parts: int = 0
    """Of a stream: those that its events hold so far."""
    told_characters: int = 0
    """Of the tokens of these parts, each as text."""

    def news(self) -> list[Generation]:
        """The parts that no event holds yet; from now on one does."""
        new = self.parts[self.told_parts :]
        self.told_parts = len(self.parts)
        return new

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        new = len(self.reply.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": self.parts[0].cached_tokens if self.parts else 0},
        }

    def written_tokens(self) -> bytes:
        """All of the reply, as `written_ids` are."""
        whole = self._written_by_engine()
        return written(self.reply.tokens) if whole is None else bytes(whole)[1:-1] + b","

    def _written_by_engine(self) -> msgspec.Raw | None:
        """The list of the reply's tokens, if one engine gave all of it at once."""
        ids = self.parts[0].answer.get("output_ids") if len(self.parts) == 1 else None
        return ids if isinstance(ids, msgspec.Raw) else None

    def output_ids(self) -> list[int] | msgspec.Raw:
        """The reply's tokens, to be encoded."""
        return self._written_by_engine() or self.reply.tokens

    def message(self) -> Message:
        """What is told as the assistant's, and found again in later requests."""
        text, calls = self.reply.text, self.reply.calls
        if not calls:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": text.strip() or None, "tool_calls": calls}


class Shape(Protocol):
    """Of one API. Of a stream: `begun` comes first, then `grown` as often as one likes, then `ended`. `pieces`: what is
    new of the reply; tokens that are new are the answer's `news`."""

    def whole(self, answer: Answer) -> dict[str, Any]: ...

    def begun(self, answer: Answer) -> bytes: ...

    def grown(self, answer: Answer, pieces: Sequence[Piece]) -> bytes: ...

    def ended(self, answer: Answer, pieces: Sequence[Piece]) -> bytes: ...


@dataclass(frozen=True)
class ChatShape:
    """`spelt`: a token as text."""

    spelt: Callable[[int], str]

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": answer.message(),
            "logprobs": self._logprobs(answer, answer.parts),
            "finish_reason": self._finish(answer),
        }
        return {**answer.head("chat.completion"), "choices": [choice], "usage": answer.usage()}

    def begun(self, answer: Answer) -> bytes:
        return self._chunk(answer, {"role": "assistant", "content": ""})

    def grown(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        """A tool call is one delta: it is told once it has been read."""
        logprobs = self._logprobs(answer, answer.news())
        deltas = [self._delta(answer, piece) for piece in pieces]
        if not deltas and logprobs is not None and logprobs["content"]:
            deltas = [{"content": ""}]
        return b"".join(self._chunk(answer, delta, None if at else logprobs) for at, delta in enumerate(deltas))

    def ended(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        chunks = self.grown(answer, pieces) + self._chunk(answer, {}, finish=self._finish(answer))
        return chunks + _usage_event(answer, "chat.completion.chunk")

    def _delta(self, answer: Answer, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, str):
            return {"content": piece}
        return {"tool_calls": [{"index": answer.reply.calls.index(piece), **piece}]}

    def _finish(self, answer: Answer) -> str:
        return "tool_calls" if answer.reply.calls and answer.finish_reason == "stop" else answer.finish_reason

    def _chunk(
        self, answer: Answer, delta: dict[str, Any], logprobs: object = None, finish: str | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event({**answer.head("chat.completion.chunk"), "choices": [choice]})

    def _logprobs(self, answer: Answer, parts: Sequence[Generation]) -> dict[str, Any] | None:
        if not answer.wanted.logprobs:
            return None
        content = []
        for token, logprob in _pairs(parts):
            text = self.spelt(token)
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content}


@dataclass(frozen=True)
class CompletionShape:
    """`spelt`: a token as text."""

    spelt: Callable[[int], str]

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": answer.reply.text,
            "logprobs": self._logprobs(answer, answer.parts),
            "finish_reason": answer.finish_reason,
        }
        return {**answer.head("text_completion"), "choices": [choice], "usage": answer.usage()}

    def begun(self, answer: Answer) -> bytes:
        return b""

    def grown(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        return self._chunks(answer, pieces, None)

    def ended(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        return self._chunks(answer, pieces, answer.finish_reason) + _usage_event(answer, "text_completion")

    def _chunks(self, answer: Answer, pieces: Sequence[Piece], finish: str | None) -> bytes:
        text = "".join(map(str, pieces))
        logprobs = self._logprobs(answer, answer.news())
        said = text or finish or (logprobs is not None and logprobs["tokens"])
        return self._chunk(answer, text, logprobs, finish) if said else b""

    def _chunk(self, answer: Answer, text: str, logprobs: object = None, finish: str | None = None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event({**answer.head("text_completion"), "choices": [choice]})

    def _logprobs(self, answer: Answer, parts: Sequence[Generation]) -> dict[str, list[Any]] | None:
        if not answer.wanted.logprobs:
            return None
        pairs = _pairs(parts)
        texts = [self.spelt(token) for token, _ in pairs]
        offsets = list(accumulate(map(len, texts), initial=answer.told_characters))
        answer.told_characters = offsets[-1]
        return {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob in pairs],
            "top_logprobs": [],
            "text_offset": offsets[:-1],
        }


class GenerateShape:
    """SGLang's: as the engine answered, fields that slimerl does not know included; of several parts one answer."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        parts, tokens = answer.parts, answer.reply.tokens
        meta = {**parts[-1].meta, "id": answer.answer_id}
        if len(parts) > 1:
            meta |= {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": len(tokens),
                "cached_tokens": parts[0].cached_tokens,
                "output_token_logprobs": [[logprob, token, None] for token, logprob in _pairs(parts)],
                "weight_versions": _spans([version for part in parts for version in part.versions]),
            }
        if not answer.wanted.logprobs:
            meta.pop("output_token_logprobs", None)
        return {**parts[-1].answer, "text": answer.reply.text, "output_ids": answer.output_ids(), "meta_info": meta}

    def begun(self, answer: Answer) -> bytes:
        return b""

    def grown(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        """SGLang's events hold all that there is so far. Of a long answer not every token has one: all together would
        be the square of it."""
        new = sum(len(part.tokens) for part in answer.parts[answer.told_parts :])
        if new * SPARSER < len(answer.reply.tokens):
            return b""
        answer.news()
        return event(self.whole(answer))

    def ended(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        return event(self.whole(answer))


def _usage_event(answer: Answer, kind: str) -> bytes:
    if not answer.wanted.stream_usage:
        return b""
    return event({**answer.head(kind), "choices": [], "usage": answer.usage()})


def _pairs(parts: Sequence[Generation]) -> list[tuple[int, float]]:
    return [pair for part in parts for pair in zip(part.tokens, part.logprobs, strict=True)]


def _spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": str(version), "start": place, "end": place + 1})
    return spans
