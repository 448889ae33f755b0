"""The two update dialects, and what is read out of SGLang's answers. The server here is a few lines of aiohttp."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from slimerl.engine.client import EngineClient, EngineError, EngineRefused, EngineTimeout, EngineUnreachable
from slimerl.engine.protocol import (
    Generation,
    ProtocolError,
    SamplingParams,
    UpdateDialect,
    generate_body,
    read_generation,
    read_scores,
    read_version,
)


def answer(count: int = 3, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": list(range(10, 10 + count)),
        "text": "abc",
        "meta_info": {
            "finish_reason": {"type": "length", "length": count},
            "output_token_logprobs": [[-0.5 * index, 10 + index, None] for index in range(count)],
            "weight_version": "4",
            **meta,
        },
    }


def test_a_generation_keeps_one_logprob_and_version_per_token_and_every_unknown_field() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    result = read_generation(answer(weight_versions=spans, novelty=[1, 2]))
    assert result.tokens == [10, 11, 12]
    assert result.logprobs == [0.0, -0.5, -1.0]
    assert result.versions == [3, 4, 4]
    assert result.finish_reason == "length"
    assert result.meta["novelty"] == [1, 2]
    assert result.answer["text"] == "abc"


@pytest.mark.parametrize(("told", "known"), [(5, 5), (None, 0), ("5", 0), ([5], 0)])
def test_what_was_cached_of_a_prompt_is_a_number_or_not_known(told: object, known: int) -> None:
    assert read_generation(answer(cached_tokens=told)).cached_tokens == known


def test_a_server_without_spans_gives_every_token_its_one_version() -> None:
    assert read_generation(answer()).versions == [4, 4, 4]


def test_an_abort_before_the_first_token_is_an_empty_generation() -> None:
    result = read_generation(answer(0, finish_reason={"type": "abort"}, weight_versions=[]))
    assert (result.tokens, result.versions, result.finish_reason) == ([], [], "abort")


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({**answer(), "output_ids": [10]}, "1 output_ids, but logprobs of 3 tokens"),
        (answer(weight_versions=[{"version": "4", "start": 0, "end": 2}]), "cover 2 tokens of 3"),
        (answer(weight_version="default"), "'default', not a policy version"),
        ({"output_ids": []}, "without 'meta_info'"),
        ({"meta_info": []}, "AttributeError"),
        (answer(finish_reason={"length": 3}), "without 'type'"),
        (answer(weight_versions=[{"version": "4", "end": 3}]), "without 'start'"),
        (answer(weight_versions=[4, 4, 4]), "TypeError"),
        ({**answer(), "output_ids": 5}, "TypeError"),
        (answer(output_token_logprobs=[[-0.5, 10, None], [None, 11, None], [-1.0, 12, None]]), "without a log-prob"),
    ],
)
def test_an_answer_that_does_not_add_up_is_an_error(broken: dict, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        read_generation(broken)


def test_versions_are_whole_numbers() -> None:
    assert read_version("-1") == -1
    with pytest.raises(ProtocolError):
        read_version(None)


def test_sampling_parameters_of_sglang_pass_as_they_stand() -> None:
    wire = SamplingParams(5, temperature=0.5, seed=9, extra={"min_p": 0.1}).wire()
    assert wire == {
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_p": 1.0,
        "sampling_seed": 9,
        "min_p": 0.1,
    }


class OldServer:
    """SGLang before 0.5.21: begin and end do not exist. `calls` lists what it was asked."""

    def __init__(self, **handlers: Callable) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._handlers = handlers

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path, body))
        handler = self._handlers.get(request.path.strip("/"))
        if handler is not None:
            return await handler(request)
        if request.path in ("/begin_weight_update", "/end_weight_update"):
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"success": True})

    def ask(self, call: Callable, timeout_s: float = 5.0) -> Any:
        async def once() -> Any:
            app = web.Application()
            app.router.add_route("*", "/{path}", self._handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                async with EngineClient("engine-7", url, "key", timeout_s) as client:
                    return await call(client)
            finally:
                await runner.cleanup()

        return asyncio.run(once())


def test_an_old_server_takes_updates_without_begin_and_end() -> None:
    server = OldServer()

    async def update(client: EngineClient) -> UpdateDialect | None:
        await client.begin_weight_update()
        await client.run_loader([b"payload"])
        await client.end_weight_update(3)
        await client.begin_weight_update()
        await client.end_weight_update(None)
        return client.dialect

    assert server.ask(update) is UpdateDialect.BARE
    assert [path for path, _ in server.calls] == [
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/update_weight_version",
    ]


def test_a_version_is_set_without_aborting_what_waits() -> None:
    server = OldServer()

    async def update(client: EngineClient) -> None:
        await client.begin_weight_update()
        await client.end_weight_update(3)

    server.ask(update)
    assert ("/update_weight_version", {"new_version": "3", "abort_all_requests": False}) in server.calls


async def _never(_request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _broken(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "the   reason\nfor it"}}, status=503)


def test_a3_every_call_has_a_deadline_that_names_engine_and_endpoint() -> None:
    for endpoint, call in (
        ("pause_generation", lambda client: client.pause()),
        ("flush_cache", lambda client: client.flush_cache()),
        ("server_info", lambda client: client.server_info()),
        ("update_weights_from_tensor", lambda client: client.run_loader([b""])),
    ):
        with pytest.raises(EngineTimeout, match=f"engine-7 /{endpoint}: no answer within 0.1 s"):
            OldServer(**{endpoint: _never}).ask(call, timeout_s=0.1)


def test_a_refusal_gives_the_servers_reason_on_one_line() -> None:
    with pytest.raises(EngineRefused, match="engine-7 /pause_generation: answered 503: the reason for it") as caught:
        OldServer(pause_generation=_broken).ask(lambda client: client.pause())
    assert caught.value.status == 503


def test_a_server_that_is_not_there_is_unreachable_and_not_healthy() -> None:
    async def ask() -> bool:
        async with EngineClient("engine-7", "http://127.0.0.1:9", "key", 5.0) as client:
            with pytest.raises(EngineUnreachable, match=r"engine-7 /server_info: .*has the engine ended"):
                await client.server_info()
            return await client.healthy()

    assert asyncio.run(ask()) is False


def test_a6_a_cancelled_request_is_aborted_on_the_server() -> None:
    server = OldServer(generate=_never)

    async def cancel(client: EngineClient) -> None:
        running = asyncio.create_task(client.generate([1], SamplingParams(4), request_id="mine"))
        while not server.calls:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    server.ask(cancel)
    assert server.calls[-1] == ("/abort_request", {"rid": "mine"})


def test_every_error_of_a_call_is_an_engine_error() -> None:
    for kind in (EngineTimeout, EngineRefused, EngineUnreachable):
        assert issubclass(kind, EngineError)


def scored(**meta: object) -> Generation:
    pairs = [[None, 5, None], [-0.5, 6, None], [-1.5, 0, None]]
    values = {"finish_reason": {"type": "length", "length": 0}, "weight_version": "3", "input_token_logprobs": pairs}
    return read_generation({"output_ids": [], "meta_info": values | meta})


def test_a_request_for_scores_says_where_they_begin_and_how_many_tokens_stand_beside() -> None:
    params = SamplingParams(0, score_from=4, score_alternatives=2)
    body = generate_body([1, 2, 3, 5, 6, 63], params, "r", {})
    assert (body["logprob_start_len"], body["top_logprobs_num"]) == (3, 2)
    assert "logprob_start_len" not in generate_body([1], SamplingParams(1), "r", {})


def test_scores_are_those_of_the_tokens_asked_for_the_last_id_of_a_vocabulary_among_them() -> None:
    """SGLang reports that id as 0, and an impossible token's logarithm as null."""
    assert read_scores(scored(), [6, 63]).logprobs == [-0.5, -1.5]
    assert read_scores(scored(), [6, 63]).version == 3
    impossible = scored(input_token_logprobs=[[None, 5, None], [None, 6, None]])
    assert read_scores(impossible, [6]).logprobs == [-math.inf]
    listed = scored(input_top_logprobs=[None, [[-0.1, 9, None], [-0.5, 6, None]], [[-1.5, 63, None]]])
    assert read_scores(listed, [6, 63]).alternatives == [([9, 6], [-0.1, -0.5]), ([63], [-1.5])]


@pytest.mark.parametrize("tokens", [[6], [7, 63], [6, 63, 1], []])
def test_scores_of_other_tokens_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ProtocolError, match="were asked for"):
        read_scores(scored(), tokens)


def test_a_request_for_no_token_has_none_although_the_server_tells_the_logprob_of_one() -> None:
    generation = scored(output_token_logprobs=[[-0.1, 12, None]])
    assert (generation.tokens, generation.logprobs, generation.versions) == ([], [], [])


@pytest.mark.parametrize("body", ["", "starting", "[]", "{}", '{"weight_version": "default"}'])
def test_a_server_that_does_not_say_which_version_it_holds_is_an_error_of_this_engine(body: str) -> None:
    """Fault: an error of another kind ended whoever looked at an expired lease's engines, and weights stayed held."""

    async def say(_: web.Request) -> web.StreamResponse:
        return web.Response(text=body)

    with pytest.raises(EngineError, match=r"/model_info: the server's weight_version is"):
        OldServer(model_info=say).ask(lambda client: client.weight_version())
