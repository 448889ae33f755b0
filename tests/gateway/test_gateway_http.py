"""The gateway's HTTP: the `openai` package as its users have it, SGLang's generate, errors, keys."""

import json
import threading
from typing import Any

import openai
import pytest
from fake_engine import STOP
from gateway_scene import END, KEY, Front, fake_engine_of, ids, model_text, play, saying

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}]
HELLO = [{"role": "user", "content": "hello"}]


def chatty(prompt: str, seed: int) -> str:
    """Calls the tool once, then says what it answered."""
    if "<result>" in prompt:
        return f"It is {prompt.rpartition('<result>')[2].partition('</result>')[0]}."
    return 'Let me see.\n<tool_call>\n{"name": "calc", "arguments": {"sum": "3+4"}}\n</tool_call>'


def spelt(tokens: Any) -> str:
    return "".join(map(model_text().spelt, tokens))


def test_m6_an_openai_program_with_tools_has_its_session_recorded_token_by_token():
    async def act(front: Front) -> None:
        client = front.client("program")
        messages: list[Any] = [{"role": "user", "content": "What is 3+4?"}]
        first = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("calc", {"sum": "3+4"})
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        second = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is 7.", "stop")
        one, two = front.sessions.get("program").turns
        assert two.parent is one
        asked = fake_engine_of(front).requests
        assert asked[1]["input_ids"][: len(asked[0]["input_ids"])] == asked[0]["input_ids"]
        assert asked[1]["input_ids"] == two.context()
        assert spelt(one.tokens) == chatty("", 0) + "<|im_end|>", "as it was sampled, white space and all"
        assert spelt(two.observed) == "\n<|im_start|>user\n<result>7</result><|im_end|>\n<|im_start|>assistant\n"
        usage = second.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(two.context()), len(two.tokens))

    play(act, engines=1, answer=saying(chatty))


def test_a_stream_tells_what_a_whole_answer_tells():
    """Parts of seven tokens: calls and characters are cut by them."""

    async def streamed(client: openai.AsyncOpenAI, **request: Any) -> tuple[str, list, list[str | None], Any]:
        text, calls, finishes, usage = "", [], [], None
        stream = await client.chat.completions.create(
            model="any", stream=True, stream_options={"include_usage": True}, **request
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                finishes.append(choice.finish_reason)
        return text, calls, finishes, usage

    async def act(front: Front) -> None:
        whole = await front.client("whole").chat.completions.create(model="any", messages=HELLO, tools=TOOLS)
        text, calls, finishes, usage = await streamed(front.client("parts"), messages=HELLO, tools=TOOLS)
        message = whole.choices[0].message
        assert text.strip() == message.content == "Let me see."
        assert [call.function.arguments for call in calls] == [message.tool_calls[0].function.arguments]
        assert finishes[-1] == "tool_calls"
        assert finishes.count(None) == len(finishes) - 1
        assert usage.total_tokens == whole.usage.total_tokens
        turns = [front.sessions.get(name).last for name in ("whole", "parts")]
        assert turns[0].tokens == turns[1].tokens
        # without tools, text is text
        text, calls, finishes, _ = await streamed(front.client("plain"), messages=HELLO)
        assert (text, calls, finishes[-1]) == (chatty("", 0), [], "stop")
        assert len(finishes) > 8

    play(act, engines=1, answer=saying_in_parts(chatty), chunk_tokens=7)


def saying_in_parts(say: Any) -> Any:
    """An engine that goes on where the text of the reply was cut."""
    whole = saying(say)

    def answer(prompt: Any, seed: int) -> list[int]:
        text = spelt(prompt)
        start, _, said = text.rpartition("<|im_start|>assistant\n")
        tokens = whole(ids(start + "<|im_start|>assistant\n"), seed)
        return tokens[len(ids(said)) :]

    return answer


def test_edited_history_opens_a_branch_and_both_are_kept():
    async def act(front: Front) -> None:
        client = front.client("s")

        async def say(messages: list[Any]) -> Any:
            return (await client.chat.completions.create(model="any", messages=messages)).choices[0].message

        first = await say(HELLO)
        await say([*HELLO, first, {"role": "user", "content": "go on"}])
        await say([*HELLO, {"role": "assistant", "content": "never said"}, {"role": "user", "content": "go on"}])
        await say([*HELLO, first, {"role": "user", "content": "go elsewhere"}])
        await say([*HELLO, first, {"role": "user", "content": "go on"}])
        session = front.sessions.get("s")
        one, two, edited, other, again = session.turns
        assert [turn.parent for turn in session.turns] == [None, one, None, one, one]
        assert "never said" in spelt(edited.observed)
        assert session.leaves() == [two, edited, other, again]
        assert again.observed is two.observed, "what was tokenised once is not tokenised again"

    play(act, engines=1)


def test_completions_go_on_token_by_token_too():
    async def act(front: Front) -> None:
        client = front.client("s")
        first = await client.completions.create(model="any", prompt="one", max_tokens=4, logprobs=1)
        choice = first.choices[0]
        assert (choice.text, choice.finish_reason) == ("repl", "length")
        assert choice.logprobs.token_logprobs == [-0.5 - token / 1000 for token in ids("repl")]
        assert choice.logprobs.text_offset == [0, 1, 2, 3]
        await client.completions.create(model="any", prompt="onerepl and more", max_tokens=4)
        stream = await client.completions.create(model="any", prompt=[*ids("one"), END], max_tokens=4, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "repl"
        one, two, three = front.sessions.get("s").turns
        assert (two.parent, spelt(two.observed)) == (one, " and more")
        assert (three.parent, list(three.observed)) == (None, [*ids("one"), END])
        # what the engine generated, and the client leaves out, is not gone on with
        stopped = await client.completions.create(model="any", prompt="two", stop=["ply"])
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("re", "stop")
        await client.completions.create(model="any", prompt="twore", max_tokens=4)
        assert front.sessions.get("s").last.parent is None

    play(act, engines=1)


def test_stop_texts_end_a_reply_wherever_parts_are_cut():
    async def act(front: Front) -> None:
        client = front.client("s")
        reply = await client.chat.completions.create(model="any", messages=HELLO, stop=["two th"])
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("one ", "stop")
        (turn,) = front.sessions.get("s").turns
        assert spelt(turn.tokens) == "one two thr", "all that was sampled, in parts of eleven"
        assert fake_engine_of(front).requests[0]["sampling_params"]["stop"] == ["two th"]

    play(act, engines=1, answer=saying_in_parts(lambda prompt, seed: "one two three four five"), chunk_tokens=11)


def test_sglangs_generate_passes_on_what_it_does_not_know():
    async def act(front: Front) -> None:
        engine = fake_engine_of(front)
        engine.extra_meta = {"a_new_field": {"of": "the engine"}}
        status, answer = await front.post(
            "/generate",
            {"input_ids": ids("one"), "sampling_params": {"max_new_tokens": 5}, "return_logprob": True},
            "s",
        )
        assert status == 200
        assert answer["output_ids"] == ids("reply")
        assert answer["meta_info"]["a_new_field"] == {"of": "the engine"}
        assert [pair[1] for pair in answer["meta_info"]["output_token_logprobs"]] == ids("reply")
        await front.post("/generate", {"input_ids": [*ids("onereply"), STOP], "sampling_params": {}}, "s")
        one, two = front.sessions.get("s").turns
        assert (two.parent, list(two.observed)) == (one, [STOP])

    play(act, engines=1)


def test_parts_of_one_generate_are_one_answer():
    async def act(front: Front) -> None:
        body = {"input_ids": ids("x<|im_start|>assistant\n"), "sampling_params": {}, "return_logprob": True}
        _, answer = await front.post("/generate", body)
        meta = answer["meta_info"]
        assert spelt(answer["output_ids"]) == "one two three<|im_end|>"
        assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == len(answer["output_ids"])
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": len(answer["output_ids"])}]
        assert meta["prompt_tokens"] == len(body["input_ids"])

    play(act, engines=1, answer=saying_in_parts(lambda prompt, seed: "one two three"), chunk_tokens=5)


def test_errors_have_the_shape_and_the_status_of_the_field():
    async def act(front: Front) -> None:
        with pytest.raises(openai.AuthenticationError, match=r"gateway\.json"):
            await openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="guess", max_retries=0).models.list()
        client = front.client("s")
        assert [model.id async for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError, match="as this run samples") as refused:
            await client.chat.completions.create(model="any", messages=HELLO, temperature=0.3)
        assert (refused.value.param, refused.value.code) == ("temperature", "temperature_of_run")
        with pytest.raises(openai.BadRequestError, match=r"more than data\.max_prompt_tokens = 1000") as refused:
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * 1000}])
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="any", input="x")
        engine = fake_engine_of(front)
        engine.faults.extend(["400"])
        with pytest.raises(openai.BadRequestError, match="the engine refused the request"):
            await client.chat.completions.create(model="any", messages=HELLO)
        engine.faults.extend(["500"] * 3)
        with pytest.raises(openai.InternalServerError, match="no engine generated this; ask again") as failed:
            await client.chat.completions.create(model="any", messages=HELLO, stream=True)
        assert failed.value.status_code == 503, "a stream that has not begun has a status"
        status, answer = await front.post("/v1/sessions/nobody/finish", {})
        assert (status, answer["error"]["code"]) == (404, "no_such_task")
        figures = front.gateway.take_figures()
        counted = {name.removeprefix("gateway/errors_"): n for name, n in figures.items() if "errors_" in name}
        assert counted == {
            "invalid_api_key": 1,
            "temperature_of_run": 1,
            "context_length_exceeded": 1,
            "unknown_path": 1,
            "generation_refused": 1,
            "generation_engine_error": 1,
            "no_such_task": 1,
        }
        assert not any("errors_" in name for name in front.gateway.take_figures())

    play(act, engines=1)


def test_a7_a_conversation_has_no_more_tokens_than_a_sample_of_the_run():
    async def act(front: Front) -> None:
        client = front.client("s")
        messages: list[Any] = list(HELLO)
        reply = (await client.chat.completions.create(model="any", messages=messages)).choices[0]
        session = front.sessions.get("s")
        while reply.finish_reason == "stop":
            messages += [reply.message, {"role": "user", "content": "go on"}]
            reply = (await client.chat.completions.create(model="any", messages=messages)).choices[0]
        last = session.last
        assert last.length - last.opening_length == 110
        messages += [reply.message, {"role": "user", "content": "go on"}]
        with pytest.raises(openai.BadRequestError, match=r"more than a sample may have \(110, rollout"):
            await client.chat.completions.create(model="any", messages=messages)
        assert session.last is last

    play(act, engines=1, max_new_tokens=110)


def test_without_a_session_nothing_is_recorded():
    async def act(front: Front) -> None:
        await front.client().chat.completions.create(model="any", messages=HELLO)
        assert {session.session_id for session in front.sessions} == set(front.external.tasks)
        status, answer = await front.post("/v1/chat/completions", {"messages": HELLO}, key=f"{KEY}:{'x' * 300}")
        assert (status, answer["error"]["code"]) == (400, "invalid_session")

    play(act, engines=1)


def test_long_texts_are_tokenised_off_the_event_loop():
    """A8. Fault: a text whose encoding takes longer than a moment."""

    async def act(front: Front) -> None:
        on_loop: list[bool] = []
        plain = front.gateway.desk.text.encode

        def encode(text: str, special: bool = False) -> list[int]:
            if text.startswith("<|im_start|>"):  # the engine's answers are encoded, too
                on_loop.append(threading.current_thread() is threading.main_thread())
            return plain(text, special)

        front.gateway.desk.text.encode = encode
        try:
            for text in ("short", "long" * 5000):
                await front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
        finally:
            del front.gateway.desk.text.encode
        assert on_loop == [True, False]

    play(act, engines=1)
