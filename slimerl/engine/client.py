"""One SGLang server, seen from outside: every call has a deadline, every error names engine, endpoint and remedy.

Flows in: token ids and sampling parameters, or steps of a weight update. Flows out: `Generation`s, or nothing.
Invariant: a call either has had its effect or raises an `EngineError`; nothing is retried here, since a caller
that holds the sample knows better whether to try again, and where.
"""

import asyncio
import base64
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from slimerl.engine.connections import ConnectionLost, Connections, Take
from slimerl.engine.protocol import (
    ANY_VOCABULARY,
    LOADER,
    Endpoint,
    Generation,
    MemoryTag,
    PauseMode,
    ProtocolError,
    SamplingParams,
    UpdateDialect,
    check_sampled,
    generate_body,
    read_answer,
    read_generation,
    read_version,
    written_body,
)
from slimerl.engine.streams import StreamedAnswer, StreamRefused

_KEEP_ALIVE_S = 2.0
"""Below the server's 5 s: it must never close a connection that a request is just being written to."""

_ABORT_TIMEOUT_S = 5.0


def _parsed(content: bytes) -> Any:
    """JSON where it is JSON; SGLang answers some control calls with plain text or nothing."""
    try:
        return msgspec.json.decode(content) if content else None
    except msgspec.DecodeError:
        return content.decode(errors="replace")


class EngineError(RuntimeError):
    """A call to an engine had no, or not the wanted, effect."""

    def __init__(self, engine_id: str, endpoint: str, problem: str) -> None:
        super().__init__(f"{engine_id} {endpoint}: {problem}")
        self.engine_id = engine_id
        self.endpoint = endpoint


class EngineUnreachable(EngineError):
    """No connection, or it broke before the answer: the server is gone or going."""


class EngineTimeout(EngineError, TimeoutError):
    """No answer before the deadline."""


class EngineRefused(EngineError):
    """The server answered, but with an error."""

    def __init__(self, engine_id: str, endpoint: str, status: int, problem: str) -> None:
        super().__init__(engine_id, endpoint, f"answered {status}: {problem}")
        self.status = status


class EngineClient:
    """Asynchronous; belongs to the event loop that first uses it. Use as a context manager, or `close` it."""

    def __init__(
        self, engine_id: str, url: str, admin_key: str, timeout_s: float, vocabulary: int = ANY_VOCABULARY
    ) -> None:
        """`timeout_s` bounds every call that does not give its own; `vocabulary`: tokens of the model."""
        self.engine_id = engine_id
        self._vocabulary = vocabulary
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {admin_key}", "Content-Type": "application/json"}
        self._connections = Connections(self.url, headers, _KEEP_ALIVE_S)
        self._dialect: UpdateDialect | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._connections.close()

    # --- generation

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
        told: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Generate from token ids.

        Args:
            request_id: unique among the running requests; default: a random one.
            extra: further fields of SGLang's /generate, as they stand.
            told: given the tokens that are new as the server makes them. What it raises ends the request, there too,
                and is raised.

        Raises:
            EngineError: among them EngineTimeout; the request has then been aborted on the server too.
            asyncio.CancelledError: likewise aborted on the server.
        """
        request_id = request_id or uuid.uuid4().hex
        body = generate_body(input_ids, params, request_id, extra or {})
        if told is not None:
            return await self._stream({**body, "stream": True}, told, timeout_s)
        try:
            generation: Generation = await self._call(
                "POST", Endpoint.GENERATE, written_body(body), timeout_s, read=read_answer
            )
            check_sampled(generation.tokens, generation.logprobs, self._vocabulary)
            return generation
        except (EngineTimeout, asyncio.CancelledError):
            await self._abort_abandoned(request_id)
            raise
        except ProtocolError as error:
            raise EngineError(self.engine_id, Endpoint.GENERATE, str(error)) from error

    async def _stream(
        self, body: dict[str, Any], told: Callable[[Generation], None], timeout_s: float | None
    ) -> Generation:
        def checked(new: Generation) -> None:
            check_sampled(new.tokens, new.logprobs, self._vocabulary)
            told(new)

        streamed = StreamedAnswer(checked)
        try:
            whole = await self._call("POST", Endpoint.GENERATE, written_body(body), timeout_s, streamed.feed)
            if whole is None:
                return streamed.generation()
            generation = read_generation(whole)  # from a server that does not stream
            checked(generation)
            return generation
        except StreamRefused as error:
            raise EngineRefused(self.engine_id, Endpoint.GENERATE, error.status, str(error)) from error
        except (EngineRefused, EngineUnreachable):
            raise
        except BaseException as error:
            await self._abort_abandoned(body["rid"])
            if isinstance(error, ProtocolError):
                raise EngineError(self.engine_id, Endpoint.GENERATE, str(error)) from error
            raise

    async def _abort_abandoned(self, request_id: str) -> None:
        """The server notices a lost client late; until then it would compute for nobody."""
        try:
            await asyncio.shield(self.abort(request_id, timeout_s=_ABORT_TIMEOUT_S))
        except (EngineError, asyncio.CancelledError):
            return  # The first error is the one to report; a server that cannot abort is dead or about to be found so.

    async def abort(self, request_id: str | None = None, *, timeout_s: float | None = None) -> None:
        """Abort one request, or all with None. Its `generate` ends with the tokens so far and reason "abort"."""
        body = {"abort_all": True} if request_id is None else {"rid": request_id}
        await self._post(Endpoint.ABORT, body, timeout_s)

    async def pause(self, mode: PauseMode | str = PauseMode.RETRACT, *, timeout_s: float | None = None) -> None:
        """Stop computing. Requests wait (`retract`, `in_place`) or end (`abort`); new ones wait."""
        await self._post(Endpoint.PAUSE, {"mode": PauseMode(mode).value}, timeout_s)

    async def continue_generation(self, *, timeout_s: float | None = None) -> None:
        await self._post(Endpoint.CONTINUE, {}, timeout_s)

    async def flush_cache(self, *, timeout_s: float | None = None) -> None:
        """Forget all prefixes. Refused while requests hold KV: pause with `retract`, or drain, first."""
        await self._post(Endpoint.FLUSH_CACHE, None, timeout_s)

    async def release_memory(self, tags: Sequence[MemoryTag], *, timeout_s: float | None = None) -> None:
        """Give up device memory, for a trainer on the same GPUs. Requests that wait are kept; running ones first give
        their KV back: SGLang's scheduler would end if asked to release memory in use."""
        await self.pause(PauseMode.RETRACT, timeout_s=timeout_s)
        await self._post(Endpoint.RELEASE_MEMORY, {"tags": [tag.value for tag in tags]}, timeout_s)

    async def resume_memory(self, tags: Sequence[MemoryTag], *, timeout_s: float | None = None) -> None:
        """Take released device memory back; its contents are undefined. The server stays paused."""
        await self._post(Endpoint.RESUME_MEMORY, {"tags": [tag.value for tag in tags]}, timeout_s)

    async def freeze_gc(self, *, timeout_s: float | None = None) -> None:
        """Tell Python's collector in every process of the server that what lives now lives for good. After a warm-up:
        full collections would otherwise stop generation for tenths of a second."""
        await self._post(Endpoint.FREEZE_GC, None, timeout_s)

    # --- weight updates

    async def begin_weight_update(self, *, timeout_s: float | None = None) -> None:
        """Open an update session; one that a dead coordinator left open is closed first."""
        try:
            await self._begin(timeout_s)
        except EngineRefused as error:
            if "already open" not in str(error):
                raise
            await self._post(Endpoint.END_UPDATE, {}, timeout_s)
            await self._begin(timeout_s)

    async def _begin(self, timeout_s: float | None) -> None:
        if self._dialect is UpdateDialect.BARE:
            return
        try:
            await self._post(Endpoint.BEGIN_UPDATE, {}, timeout_s)
            self._dialect = UpdateDialect.SESSION
        except EngineRefused as error:
            if error.status != 404:
                raise
            self._dialect = UpdateDialect.BARE

    async def run_loader(self, payloads: Sequence[bytes], *, timeout_s: float | None = None) -> None:
        """Call slimerl's weight loader inside every tensor-parallel rank and wait until all have returned.

        Args:
            payloads: one pickle of `[(name, tensor)]` per tensor-parallel rank, see `resharding/transports`.
        """
        body: dict[str, Any] = {
            "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
            "load_format": LOADER,
            # A flush would be refused, and the update reported as failed after the write, while requests wait.
            "flush_cache": False,
        }
        if self._dialect is UpdateDialect.SESSION:
            # a model that an engine drafts with keeps its weights: no trainer has others for it
            body["selector"] = "target"
        await self._post(Endpoint.UPDATE_FROM_TENSOR, body, timeout_s)

    async def end_weight_update(self, version: int | None, *, timeout_s: float | None = None) -> None:
        """Close the session. With `version`, tokens generated from now on carry it; None leaves the old one."""
        if self._dialect is not UpdateDialect.BARE:
            await self._post(Endpoint.END_UPDATE, {}, timeout_s)
        if version is not None:
            # Without the last field SGLang would abort what waits to go on.
            await self._post(
                Endpoint.SET_VERSION, {"new_version": str(version), "abort_all_requests": False}, timeout_s
            )

    @property
    def dialect(self) -> UpdateDialect | None:
        """None until the first `begin_weight_update`."""
        return self._dialect

    async def weights_checksum(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """SGLang's own checksums, one entry per rank with `checksums` (fused local tensor → hash)."""
        answer = await self._post(Endpoint.WEIGHTS_CHECKER, {"action": "checksum"}, timeout_s)
        return answer["ranks"]

    # --- state

    async def healthy(self, *, timeout_s: float | None = None) -> bool:
        """Does the server say that it is up? False where it cannot be reached; also true while paused."""
        try:
            await self._get(Endpoint.HEALTH, timeout_s)
        except EngineError:
            return False
        return True

    async def server_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        return await self._get(Endpoint.SERVER_INFO, timeout_s)

    async def model_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        return await self._get(Endpoint.MODEL_INFO, timeout_s)

    async def weight_version(self, *, timeout_s: float | None = None) -> int:
        """Raises EngineError, also where the server does not say."""
        info = await self.model_info(timeout_s=timeout_s)
        try:
            return read_version(info.get("weight_version") if isinstance(info, dict) else info)
        except ProtocolError as error:
            raise EngineError(self.engine_id, Endpoint.MODEL_INFO, str(error)) from None

    # --- transport

    async def _post(self, endpoint: Endpoint, body: dict | None, timeout_s: float | None) -> Any:
        data = () if body is None else (msgspec.json.encode(body),)
        return await self._call("POST", endpoint, data, timeout_s)

    async def _get(self, endpoint: Endpoint, timeout_s: float | None) -> Any:
        return await self._call("GET", endpoint, (), timeout_s)

    async def _call(
        self,
        method: str,
        endpoint: Endpoint,
        body: Sequence[bytes | memoryview],
        timeout_s: float | None,
        take: Take | None = None,
        read: Callable[[bytes], Any] = _parsed,
    ) -> Any:
        """`body`: in pieces; `read`: of an answer's body; what it raises is raised."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            status, content = await self._connections.request(method, endpoint, body, take, limit_s)
        except TimeoutError:
            raise EngineTimeout(
                self.engine_id,
                endpoint,
                f"no answer within {limit_s:g} s; is the engine overloaded or stuck? See its log",
            ) from None
        except ConnectionLost as error:
            raise EngineUnreachable(
                self.engine_id, endpoint, f"{type(error).__name__}: {error}; has the engine ended? Its log says why"
            ) from error
        if status >= 400:
            raise EngineRefused(self.engine_id, endpoint, status, _reason(content))
        return read(content)


def _reason(content: bytes) -> str:
    """The one useful line of an error body; SGLang has three shapes for it."""
    body = _parsed(content)
    if isinstance(body, dict):
        error = body.get("error", body)
        body = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(body).split())[:500]
