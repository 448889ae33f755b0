"""The HTTP dialect of a SGLang server: endpoints, values, and what differs between versions. Pure.

Weight updates come in two dialects. From 0.5.21 on they stand between `begin_weight_update` and
`end_weight_update` (400 without); older servers answer 404 to these two and take updates at any time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from slimerl.engine.routed_experts import RoutedExperts
from slimerl.samples.written_ids import WrittenIds

UNVERIFIED_VERSION = -1
"""Weight version of a server that has started but not yet been given verified weights."""

LOADER = "slimerl.engine.inside.loader.receive"
"""The custom weight loader through which all weight traffic goes; also SGLang's `load_format` for it."""


class Endpoint(StrEnum):
    HEALTH = "/health"
    GENERATE = "/generate"
    PAUSE = "/pause_generation"
    CONTINUE = "/continue_generation"
    ABORT = "/abort_request"
    FLUSH_CACHE = "/flush_cache"
    FREEZE_GC = "/freeze_gc"
    BEGIN_UPDATE = "/begin_weight_update"
    END_UPDATE = "/end_weight_update"
    UPDATE_FROM_TENSOR = "/update_weights_from_tensor"
    SET_VERSION = "/update_weight_version"
    WEIGHTS_CHECKER = "/weights_checker"
    SERVER_INFO = "/server_info"
    MODEL_INFO = "/model_info"
    RELEASE_MEMORY = "/release_memory_occupation"
    RESUME_MEMORY = "/resume_memory_occupation"


class PauseMode(StrEnum):
    """`RETRACT`: running requests give their KV back and go on later, so that the cache can be flushed."""

    RETRACT = "retract"
    IN_PLACE = "in_place"
    ABORT = "abort"


class MemoryTag(StrEnum):
    """Device memory that a server started with --enable-memory-saver can give up for a while. Contents are lost:
    weights come back by the next sync, the KV cache empty."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class UpdateDialect(StrEnum):
    SESSION = "session"
    """Updates stand between begin and end."""
    BARE = "bare"
    """The server knows neither."""


class ProtocolError(ValueError):
    """The server's answer is not what this version of the protocol promises."""


class SamplingParams(msgspec.Struct, frozen=True):
    """`seed` keys the draw: the same seed and the same tokens give the same next token in any batch.

    `temperature` 0 takes the most likely token; its logprob is then the one at temperature 1.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    score_from: int | None = None
    """The input's tokens from this place on (at least 1) are scored: `read_scores`."""
    score_alternatives: int = 0
    """The most likely tokens of each of these places that are listed beside; above the size of the vocabulary SGLang's
    scheduler ends."""
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Further sampling parameters of SGLang, as they stand."""

    def wire(self) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        if self.stop_token_ids:
            params["stop_token_ids"] = list(self.stop_token_ids)
        return {**params, **self.extra}


class Generation(msgspec.Struct, frozen=True):
    """What came of one request. `tokens`, `logprobs` and `versions` have one entry per generated token."""

    tokens: list[int]
    logprobs: list[float]
    """Natural logarithm, of the distribution that was sampled from: after temperature, before top-p."""
    versions: list[int]
    """Policy version whose weights produced the token."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    meta: dict[str, Any]
    """The server's whole `meta_info`, unknown fields included; log-probabilities perhaps as `msgspec.Raw`."""
    answer: dict[str, Any]
    """The rest of the server's answer; `output_ids` perhaps as `msgspec.Raw`."""
    routing: RoutedExperts | None = None
    """Where it was asked for and is told."""

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, tokens whose KV the server had; 0 where it does not tell, or tells no number."""
        told = self.meta.get("cached_tokens")
        return told if isinstance(told, int) else 0


def generate_body(input_ids: Sequence[int], params: SamplingParams, request_id: str, extra: Mapping[str, Any]) -> dict:
    """To be written by `written_body`; ids that are written already stay as they are."""
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": input_ids if isinstance(input_ids, WrittenIds) else list(input_ids),
        "sampling_params": params.wire(),
        "return_logprob": True,
        "stream": False,
    }
    if params.score_from is not None:
        # SGLang's first place has no entry of its own: what it lists begins one token later
        body["logprob_start_len"] = params.score_from - 1
        body["top_logprobs_num"] = params.score_alternatives
    return {**body, **extra}


def written_body(body: dict[str, Any]) -> Sequence[bytes | memoryview]:
    """JSON, in pieces: ids that are written already, which are nearly all of it, are not copied."""
    ids = body.get("input_ids")
    if not isinstance(ids, WrittenIds):
        return (_write(body),)
    rest = _write({**body, "input_ids": ()})
    at = rest.index(_NO_IDS) + len(_NO_IDS) - 1
    return memoryview(rest)[:at], memoryview(ids.text)[:-1], memoryview(rest)[at:]


_NO_IDS = b'"input_ids":[]'
_IDS, _PAIRS = b'"output_ids":[', b'"output_token_logprobs":[['
_read_any = msgspec.json.Decoder().decode
_write = msgspec.json.Encoder().encode


ANY_VOCABULARY = 2**31
"""Ids of more tokens do not go into the arrays that samples travel in."""
_LEAST_LOGPROB = -3.4028234663852886e38
"""In float32, in which the trainer has them, the least number that is finite."""
_MOST_LOGPROB = 1e-3
"""0, but for rounding."""
_LOGPROBS = list[Annotated[float, msgspec.Meta(ge=_LEAST_LOGPROB, le=_MOST_LOGPROB)]]


def check_sampled(tokens: Sequence[int], logprobs: Sequence[float], vocabulary: int) -> None:
    """Raises ProtocolError: ids of no token, or what is no log-probability. A trainer that computed with them would end
    with them.

    Args:
        vocabulary: tokens of the model.
    """
    try:
        # one pass over each, which ends at NaN as well
        msgspec.convert(tokens, _tokens_of(vocabulary))
        msgspec.convert(logprobs, _LOGPROBS)
    except msgspec.ValidationError as error:
        for token in tokens:
            if not 0 <= token < vocabulary:
                known = f"the model has tokens 0 to {vocabulary - 1}"
                raise ProtocolError(f"/generate answered token {token}, and {known}") from None
        for logprob in logprobs:
            if not _LEAST_LOGPROB <= logprob <= _MOST_LOGPROB:
                raise ProtocolError(f"/generate answered {logprob} for a log-probability") from None
        raise ProtocolError(f"/generate answered what is no token, or no log-probability: {error}") from None


@lru_cache(maxsize=16)
def _tokens_of(vocabulary: int) -> Any:
    """The type of a list of its tokens."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocabulary)]]


def read_answer(content: bytes) -> Generation:
    """`read_generation` for the body of an answer.

    Tokens and log-probabilities are most of it. They are read as what they must be, and stay in `answer` and `meta` as
    they were written, for who passes them on. Where they are not what is expected, everything is read as it comes.

    Raises:
        ProtocolError: it is not JSON, or as `read_generation`.
    """
    try:
        generation = _read_apart(content)
    # whatever is the matter with it is said below
    except (msgspec.MsgspecError, LookupError, TypeError):
        generation = None
    if generation is not None:
        return generation
    try:
        return read_generation(_read_any(content))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a /generate answer that is not JSON ({error}): {content[:300]!r}") from None


def _read_apart(content: bytes) -> Generation | None:
    """None: it is none of those that are known."""
    ids_begin = content.find(_IDS) + len(_IDS) - 1
    ids_end = content.find(b"]", ids_begin) + 1
    begin = content.find(_PAIRS, ids_end) + len(_PAIRS) - 2
    # from behind it is found at once: from the front each pair is nearly an end of them
    end = content.rfind(b"]]") + 2
    if content.find(b'"', begin, end) >= 0:
        end = content.find(b"]]", begin) + 2  # others come behind them
    if ids_begin < len(_IDS) - 1 or begin < ids_end or end < begin:
        return None
    ids, pairs = content[ids_begin:ids_end], content[begin:end]
    if ids.translate(None, b"0123456789,") != b"[]":
        return None
    answer = _read_any(b"%b0%b0%b" % (content[:ids_begin], content[ids_end:begin], content[end:]))
    meta = answer["meta_info"]
    if answer["output_ids"] != 0 or meta["output_token_logprobs"] != 0 or _of_no_token(meta["finish_reason"]):
        return None
    # [logprob, token, null] each: one flat list is read faster than many short ones
    flat = _read_any(b"[%b]" % pairs.translate(None, b"[]"))
    tokens, count = flat[1::3], pairs.count(b"[") - 1
    if len(flat) != 3 * count or flat[2::3].count(None) != count or _write(tokens) != ids:
        return None
    logprobs = msgspec.convert(flat[0::3], list[float])
    answer["output_ids"], meta["output_token_logprobs"] = msgspec.Raw(ids), msgspec.Raw(pairs)
    return _checked(answer, tokens, logprobs)


def read_generation(answer: dict[str, Any]) -> Generation:
    """Raises ProtocolError where tokens, logprobs and versions do not agree in number, or are none."""
    return _checked(answer, None, None)


def _checked(answer: dict[str, Any], tokens: list[int] | None, logprobs: list[float] | None) -> Generation:
    try:
        return _generation(answer, tokens, logprobs)
    except ProtocolError:
        raise
    # whatever else the server sent in their place
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"a /generate answer without {error} ({type(error).__name__}): {str(answer)[:300]}"
        ) from None


def _generation(answer: dict[str, Any], tokens: list[int] | None, logprobs: list[float] | None) -> Generation:
    """`tokens`, `logprobs`: the answer's, where they are known; else they are read from it."""
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    finish = meta["finish_reason"]
    if tokens is None or logprobs is None:
        tokens, logprobs = _numbers([] if _of_no_token(finish) else pairs)
        output_ids = answer.get("output_ids") or []
        if output_ids != tokens:
            raise ProtocolError(
                f"/generate answered {len(output_ids)} output_ids, but logprobs of {len(tokens)} tokens"
            )
    rest = dict(answer)
    del rest["meta_info"]
    return Generation(
        tokens=tokens,
        logprobs=logprobs,
        versions=_versions(meta, len(tokens)),
        finish_reason=finish["type"] if isinstance(finish, dict) else str(finish),
        meta=meta,
        answer=rest,
    )


def _of_no_token(finish: object) -> bool:
    """A request for no token that was batched with others has the log-probability of one it does not have."""
    return isinstance(finish, dict) and finish.get("length") == 0


def _numbers(pairs: Sequence[Any]) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of pairs that may be anything."""
    try:
        tokens, logprobs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        if set(map(type, tokens)) <= {int} and set(map(type, logprobs)) <= {float}:
            return tokens, logprobs
        return [int(token) for token in tokens], [float(logprob) for logprob in logprobs]
    except (IndexError, TypeError, ValueError) as error:
        # a server whose weights hold NaN answers with null
        raise ProtocolError(
            f"/generate answered a token without a log-probability ({error}): {str(pairs)[:300]}"
        ) from None


@dataclass(frozen=True)
class Scores:
    """Of tokens of the input, each given those before it: natural logarithms at temperature 1, whatever the request's
    temperature is. `alternatives`: of each place the most likely tokens, (ids, logprobs); none where none were asked
    for. `version`: whose weights were served when the answer was given; the scores are theirs or an older one's."""

    logprobs: list[float]
    alternatives: list[tuple[list[int], list[float]]]
    version: int


def read_scores(generation: Generation, tokens: Sequence[int]) -> Scores:
    """Scores of `tokens`, which ended the input of a request with `score_from` at the first of them.

    Raises:
        ProtocolError: they are missing, or those of other tokens.
    """
    try:
        return _scores(generation.meta, tokens)
    except ProtocolError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"scores of another form ({type(error).__name__}: {error}) were answered") from None


def _scores(meta: dict[str, Any], tokens: Sequence[int]) -> Scores:
    pairs = (meta.get("input_token_logprobs") or [])[1:]
    # SGLang reports the last id of a vocabulary as 0
    if len(pairs) != len(tokens) or any(pair[1] not in (token, 0) for pair, token in zip(pairs, tokens, strict=True)):
        raise ProtocolError(f"scores of {len(tokens)} tokens were asked for, and {str(pairs)[:200]} was answered")
    listed = (meta.get("input_top_logprobs") or [])[1:]
    return Scores(
        logprobs=[-math.inf if pair[0] is None else float(pair[0]) for pair in pairs],
        alternatives=[([int(one[1]) for one in place], [float(one[0]) for one in place]) for place in listed],
        version=read_version(meta.get("weight_version")),
    )


def _versions(meta: dict[str, Any], count: int) -> list[int]:
    """One version per token, from the spans where the server reports them (≥ 0.5.22), else all the same."""
    spans = meta.get("weight_versions")
    if not spans:
        return [read_version(meta.get("weight_version"))] * count
    versions: list[int] = []
    for span in spans:
        versions += [read_version(span["version"])] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ProtocolError(f"weight_versions cover {len(versions)} tokens of {count}: {spans}")
    return versions


def read_version(value: object) -> int:
    """SGLang keeps the weight version as text; slimerl only ever sets whole numbers."""
    try:
        return int(str(value))
    except ValueError:
        raise ProtocolError(
            f"the server's weight_version is {value!r}, not a policy version; was its update made by slimerl?"
        ) from None
