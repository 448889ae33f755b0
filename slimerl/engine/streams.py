"""The answer of an engine while it is written: the events of SGLang's /generate with `stream`. Pure.

Flows in: the body, piece by piece as it comes. Flows out: the tokens that are new, and in the end the same answer as in
one piece.
Invariant: each token is told once and in order, whether the server's events hold what is new
(`--incremental-streaming-output`) or all that there is so far.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slimerl.engine.protocol import Generation, ProtocolError, read_version

DONE = b"[DONE]"


class StreamRefused(RuntimeError):
    """The server ended a stream with an error. `status`: as it would have had without a stream."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


@dataclass
class Events:
    """Server-sent events in a body."""

    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is complete by now."""
        # a carriage return stands at the ends of lines alone: JSON escapes it
        self._rest += data.replace(b"\r", b"")
        while (end := self._rest.find(b"\n\n")) >= 0:
            lines = bytes(self._rest[:end]).split(b"\n")
            del self._rest[: end + 2]
            if said := b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:")):
                yield said


@dataclass
class StreamedAnswer:
    """`told` is given what is new, with the `meta` of its event; what it raises is raised by `feed`."""

    told: Callable[[Generation], None]
    tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _pairs: list[list[Any]] = field(default_factory=list)
    _events: Events = field(default_factory=Events)
    _last: dict[str, Any] | None = None
    """The event that ended it."""

    def feed(self, data: bytes) -> None:
        """The next piece of the body.

        Raises:
            ProtocolError: it makes no sense.
            StreamRefused: the server ends it with an error.
        """
        for said in self._events.feed(data):
            if said != DONE:
                self._take(_decoded(said))

    def generation(self) -> Generation:
        """The whole of it. Raises ProtocolError: the end is missing."""
        if self._last is None:
            raise ProtocolError(f"the stream ended after {len(self.tokens)} tokens without a finish reason")
        meta = {**self._last["meta_info"], "output_token_logprobs": self._pairs}
        answer = {key: value for key, value in self._last.items() if key != "meta_info"}
        return Generation(
            self.tokens,
            self._logprobs,
            self._versions,
            _reason(meta),
            meta,
            {**answer, "output_ids": self.tokens},
        )

    def _take(self, event: dict[str, Any]) -> None:
        try:
            new = self._read(event)
        except ProtocolError:
            raise
        # whatever else the server sent in the place of what is read there
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"an event without {error} ({type(error).__name__}): {str(event)[:300]}") from None
        if new.tokens:
            self.told(new)

    def _read(self, event: dict[str, Any]) -> Generation:
        """What is new, which is known from then on."""
        error, meta = event.get("error"), event.get("meta_info")
        if isinstance(error, dict):
            code = error.get("code")
            raise StreamRefused(code if isinstance(code, int) else 500, str(error.get("message", error)))
        if not isinstance(meta, dict) or self._last is not None:
            raise ProtocolError(f"an event that is none of an answer: {str(event)[:300]}")
        new = self._new(event, meta)
        finish = meta.get("finish_reason")
        if isinstance(finish, dict) and _reason(meta) == "abort" and (finish.get("status_code") or 0) >= 400:
            raise StreamRefused(finish["status_code"], str(finish.get("message")))
        self.tokens += new.tokens
        self._logprobs += new.logprobs
        self._versions += new.versions
        if finish is not None:
            self._last = event
        return new

    def _new(self, event: dict[str, Any], meta: dict[str, Any]) -> Generation:
        known, ids = len(self.tokens), event.get("output_ids") or []
        count = meta.get("completion_tokens")
        fresh = count - known if isinstance(count, int) else len(ids)
        # what is new stands last, whatever stands before it
        pairs = (meta.get("output_token_logprobs") or [])[-fresh:] if fresh > 0 else []
        try:
            tokens, logprobs = [int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs]
        except (IndexError, TypeError, ValueError) as error:
            raise ProtocolError(f"a token without a log-probability ({error}): {str(pairs)[:300]}") from None
        # a request that is aborted while it waits has its last id told again, without a token of its own
        aborted = _reason(meta) == "abort"
        if fresh < 0 or len(tokens) != fresh or (ids[len(ids) - fresh :] != tokens and not aborted):
            raise ProtocolError(
                f"{fresh} tokens are new after {known}, but an event has {len(ids)} ids and {len(tokens)} logprobs"
            )
        self._pairs += pairs
        return Generation(tokens, logprobs, _versions(meta, known, known + fresh), _reason(meta), meta, event)


def _versions(meta: dict[str, Any], start: int, end: int) -> list[int]:
    """Of the tokens from `start` up to `end`."""
    spans = meta.get("weight_versions")
    if not spans:
        return [read_version(meta.get("weight_version"))] * (end - start)
    versions: list[int] = []
    for span in spans:
        versions += [read_version(span["version"])] * (min(span["end"], end) - max(span["start"], start))
    if len(versions) != end - start:
        raise ProtocolError(f"weight_versions cover {len(versions)} tokens of {end - start} from {start} on: {spans}")
    return versions


def _reason(meta: dict[str, Any]) -> str:
    """Empty: it goes on."""
    finish = meta.get("finish_reason")
    return "" if finish is None else finish["type"] if isinstance(finish, dict) else str(finish)


def _decoded(said: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(said, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"an event that is no JSON object ({error}): {said[:300]!r}") from None
