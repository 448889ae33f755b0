"""What clients ask for, read and checked. Pure.

Flows in: bodies of OpenAI's chat completions and completions, and of SGLang's generate. Flows out: `Wanted`, with the
messages or the prompt.
Invariant: what would sample from another distribution than the one that is trained is refused, and the error names the
field; what a server may leave undone without changing that (`user`, `metadata`, …) is not looked at.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from slimerl.rollout.gateway.errors import refused
from slimerl.samples.written_ids import TokenId, canonical

MAX_STOPS = 16


class Wanted(msgspec.Struct, frozen=True):
    """`max_tokens`: of the reply; None: what is left."""

    max_tokens: int | None
    stops: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False
    model: str = ""
    engine_params: Mapping[str, Any] | None = None
    """Sampling parameters that go to the engine as they stand."""
    ignores_eos: bool = False


class _Sampling(msgspec.Struct, kw_only=True):
    model: str = ""
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None


class ChatBody(_Sampling, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class CompletionBody(_Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class GenerateParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of SGLang's; what is not in here would change what is sampled."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    sampling_seed: int | None = None
    ignore_eos: bool = False


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: str | None = None
    input_ids: list[TokenId] | None = None
    sampling_params: GenerateParams = msgspec.field(default_factory=GenerateParams)
    stream: bool = False
    return_logprob: bool = False
    rid: str | None = None
    model: str = ""


class FinishBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The end of a session. `reward`: the program's own, with `correct`; None: the run's reward judges. `error`: it
    came to nothing, and is not trained."""

    reward: float | None = None
    correct: bool | None = None
    error: str | None = None


class TaskBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`session_id`: the program's own name for the session; `wait_s`: for a task, at most."""

    session_id: str | None = None
    wait_s: float = 30.0


Body = TypeVar("Body", bound=msgspec.Struct)


def read_body(data: bytes, kind: type[Body]) -> Body:
    """Raises ApiError: no such body."""
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        path = str(error).partition("`$.")[2].rstrip("`") or None
        raise refused(f"the request: {error}", path) from None
    except msgspec.DecodeError as error:
        raise refused(f"the request is not JSON: {error}", None, "invalid_json") from None


_IDS = re.compile(rb'"input_ids": ?\[')


def cut_generate(data: bytes) -> tuple[GenerateBody, bytes | None]:
    """The body of a generate request without the ids of its prompt, and the text of these (`written_ids`), not read
    yet; None: they are in the body, or there are none.

    Raises:
        ApiError: no such body.
    """
    found = _IDS.search(data)
    # inside of a text its quotation marks would be escaped; a second one, or one that is another's, is seen below
    if found is None:
        return read_body(data, GenerateBody), None
    begin = found.end()
    end = data.find(b"]", begin)
    try:
        body = msgspec.json.decode(data[:begin] + data[end:], type=GenerateBody)
    except msgspec.MsgspecError:
        body = None
    if end < 0 or body is None or body.input_ids != [] or data.find(b'input_ids"', end) >= 0:
        return read_body(data, GenerateBody), None
    return body, canonical(data, begin, end)


def read_chat(body: ChatBody, temperature: float) -> Wanted:
    """Raises ApiError. `temperature`: of the run."""
    _check_sampling(body, temperature)
    if body.tool_choice not in (None, "auto", "none"):
        raise refused(
            "tool_choice must be 'auto' or 'none': a forced call would be sampled from another distribution",
            "tool_choice",
        )
    if body.top_logprobs:
        raise refused("top_logprobs is not served, only the sampled tokens' logprobs", "top_logprobs")
    if body.continue_final_message:
        raise refused("continue_final_message is not served", "continue_final_message")
    for number, tool in enumerate(body.tools or ()):
        if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
            raise refused(f"tools[{number}] must have a function with a name", f"tools[{number}]")
    given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _wanted(body, given, bool(body.logprobs))


def read_completion(body: CompletionBody, temperature: float) -> tuple[Wanted, str | list[int]]:
    """The request and its one prompt, as text or ids. Raises ApiError."""
    _check_sampling(body, temperature)
    for name in ("echo", "suffix"):
        if getattr(body, name):
            raise refused(f"{name} is not served", name)
    if body.best_of not in (None, 1):
        raise refused("best_of must be 1: a choice among completions is another distribution", "best_of")
    if body.logprobs is not None and body.logprobs > 1:
        raise refused("logprobs above 1 is not served, only the sampled tokens' logprobs", "logprobs")
    # without a bound, OpenAI's completions end after 16 tokens
    wanted = _wanted(body, 16 if body.max_tokens is None else body.max_tokens, body.logprobs is not None)
    return wanted, _one_prompt(body.prompt)


def read_generate(body: GenerateBody, temperature: float) -> tuple[Wanted, str | list[int]]:
    """The request and its prompt, as text or ids. Raises ApiError."""
    params = body.sampling_params
    _check_temperature(params.temperature, temperature, "sampling_params.temperature")
    _neutral("sampling_params.top_p", params.top_p, (1.0,))
    _neutral("sampling_params.n", params.n, (1,))
    if (body.text is None) == (body.input_ids is None):
        raise refused("give either text or input_ids, of one request", "input_ids")
    wanted = Wanted(
        # SGLang's default
        _bound(128 if params.max_new_tokens is None else params.max_new_tokens, "sampling_params.max_new_tokens"),
        _stops(params.stop),
        params.sampling_seed,
        body.return_logprob,
        body.stream,
        model=body.model,
        engine_params={"ignore_eos": True} if params.ignore_eos else None,
        ignores_eos=params.ignore_eos,
    )
    return wanted, body.text if body.text is not None else body.input_ids or []


def _wanted(body: _Sampling, max_tokens: int | None, logprobs: bool) -> Wanted:
    return Wanted(
        _bound(max_tokens, "max_tokens"),
        _stops(body.stop),
        body.seed,
        logprobs,
        bool(body.stream),
        bool((body.stream_options or {}).get("include_usage")),
        body.model,
    )


def _check_sampling(body: _Sampling, temperature: float) -> None:
    _check_temperature(body.temperature, temperature, "temperature")
    _neutral("n", body.n, (1,))
    _neutral("top_p", body.top_p, (1.0,))
    _neutral("top_k", body.top_k, (-1, 0))
    _neutral("min_p", body.min_p, (0.0,))
    _neutral("presence_penalty", body.presence_penalty, (0.0,))
    _neutral("frequency_penalty", body.frequency_penalty, (0.0,))
    _neutral("repetition_penalty", body.repetition_penalty, (1.0,))
    for name in ("logit_bias", "regex", "json_schema", "ebnf"):
        if getattr(body, name):
            raise refused(f"{name} is refused: it changes the distribution that is trained; leave it out", name)
    if body.response_format and body.response_format.get("type") != "text":
        raise refused(
            "response_format must be 'text': constrained sampling changes the distribution that is trained; ask for "
            "the format in the prompt",
            "response_format",
        )


def _check_temperature(given: float | None, of_run: float, param: str) -> None:
    if given is not None and given != of_run:
        raise refused(
            f"{param} must be {of_run:g}, as this run samples (rollout.temperature), since it trains on what is "
            "sampled here; leave it out",
            param,
            "temperature_of_run",
        )


def _neutral(name: str, given: float | None, allowed: Sequence[float]) -> None:
    if given is not None and given not in allowed:
        raise refused(
            f"{name} must be {allowed[0]:g}: this run trains on what is sampled here, from the whole distribution; "
            "leave it out",
            name,
        )


def _bound(tokens: int | None, param: str) -> int | None:
    if tokens is not None and tokens < 1:
        raise refused(f"{param} must be at least 1", param)
    return tokens


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS or not all(stops):
        raise refused(f"stop must be at most {MAX_STOPS} texts, none of them empty", "stop")
    return stops


def _one_prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        only = prompt[0]
        return only if isinstance(only, str) else _ids(only)
    if isinstance(prompt, str):
        return prompt
    ids = [each for each in prompt if isinstance(each, int)]
    if len(ids) < len(prompt):
        raise refused("one prompt at a time: send several requests", "prompt")
    return _ids(ids)


def _ids(ids: list[int]) -> list[int]:
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
        raise refused("token ids are whole numbers from 0 on", "prompt")
    return ids
