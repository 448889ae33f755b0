"""Programs outside of the run make its samples: tasks, their ends, and what is trained of them."""

import asyncio
from typing import Any

import pytest
from gateway_scene import Front, fake_engine_of, ids, play, saying

from slimerl.rewards.outcome import Scored
from slimerl.samples.messages import BatchManifest, EvaluateRequest
from slimerl.samples.sample import OBSERVED_VERSION, response_arrays
from slimerl.samples.store import SampleStore


async def converse(front: Front, task: dict[str, Any], turns: int = 2, **ending: Any) -> dict[str, Any]:
    """What an agent program does."""
    client = front.client(task["session_id"])
    messages: list[Any] = list(task["messages"])
    for _ in range(turns):
        reply = await client.chat.completions.create(model="any", messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
    status, answer = await front.post(f"/v1/sessions/{task['session_id']}/finish", ending)
    assert status == 200, answer
    return answer


def stopped_clock(front: Front) -> list[float]:
    """Nobody is silent until it is advanced, however slow this machine is."""
    now = [0.0]
    front.external.clock = lambda: now[0]
    return now


def arrays_of(store: SampleStore, manifest: BatchManifest) -> dict[str, dict[str, list]]:
    payloads = store.payloads([sample.sample_id for sample in manifest.samples])
    return {payload.sample_id: response_arrays(payload) for payload in payloads}


def test_m6_a_programs_conversations_are_the_batch_token_by_token():
    async def act(front: Front) -> None:
        sent: dict[str, list[int]] = {}
        tasks = []
        for number in range(6):
            task = await front.take()
            tasks.append(task)
            sample_id = front.external.tasks[task["session_id"]].sample.sample_id
            await converse(front, task, reward=float(number % 2), correct=number % 2 == 1)
            sent[sample_id] = fake_engine_of(front).requests[-1]["input_ids"]
        manifest = await front.scene.batch(1)
        for meta in manifest.samples:
            arrays = arrays_of(front.scene.store, manifest)[meta.sample_id]
            assert arrays["tokens"][: len(sent[meta.sample_id])] == sent[meta.sample_id]
            opening = ids(
                f"<|im_start|>user\nquestion {meta.sample_id.split('/')[1][1:]}<|im_end|>\n<|im_start|>assistant\n"
            )
            assert arrays["tokens"][: meta.prompt_length] == opening
            response = arrays["tokens"][meta.prompt_length :]
            between = ids("\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
            reply = len(response) - len(between)
            assert arrays["sampled"] == [True] * (reply // 2) + [False] * len(between) + [True] * (reply // 2)
            for token, mark, logprob, version in zip(
                response, arrays["sampled"], arrays["behavior_logprobs"], arrays["versions"], strict=True
            ):
                assert logprob == (pytest.approx(-0.5 - token / 1000) if mark else 0.0)
                assert version == (0 if mark else OBSERVED_VERSION)
            assert meta.reward == float(bool(meta.correct))
        assert sorted(meta.reward for meta in manifest.samples) == [0, 0, 0, 1, 1, 1]
        assert {task["prompt"] for task in tasks} == {task["messages"][0]["content"] for task in tasks}
        assert manifest.metrics["gateway/requests"] == 12
        assert manifest.metrics["gateway/sessions_finished"] == 6
        assert len(front.sessions) == 0

    play(act, engines=1, groups=2, size=3, steps=1)


def test_where_the_program_gives_no_reward_the_runs_reward_judges_the_last_reply():
    async def act(front: Front) -> None:
        judged: list[Any] = []
        front.scene.reward.verdict = lambda request: judged.append(request) or Scored(0.25, False)
        for _ in range(2):
            await converse(front, await front.take(), turns=2)
        manifest = await front.scene.batch(1)
        assert [meta.reward for meta in manifest.samples] == [0.25, 0.25]
        assert len(judged) == 2
        for request in judged:
            meta = next(each for each in manifest.samples if each.sample_id == request.sample_id)
            arrays = arrays_of(front.scene.store, manifest)[meta.sample_id]
            last = arrays["tokens"][-len(request.response.split()) :]
            assert request.response == " ".join(map(str, last)), "of the last turn alone"
            assert 0 < len(last) < meta.sampled_length

    play(act, engines=1, groups=1, size=2, steps=1)


@pytest.mark.parametrize(("branch", "turns"), [("finished", 1), ("longest", 3)])
def test_the_branch_that_the_spec_names_is_trained(branch, turns):
    async def act(front: Front) -> None:
        for _ in range(2):
            task = await front.take()
            client = front.client(task["session_id"])
            messages: list[Any] = list(task["messages"])
            for _ in range(3):
                reply = await client.chat.completions.create(model="any", messages=messages)
                messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
            await converse(front, task, turns=1, reward=1.0)
        manifest = await front.scene.batch(1)
        for arrays in arrays_of(front.scene.store, manifest).values():
            assert 1 + arrays["sampled"].count(False) // 25 == turns

    play(act, engines=1, groups=1, size=2, steps=1, branch=branch)


def test_all_branches_are_trained_and_what_they_share_is_trained_once():
    async def act(front: Front) -> None:
        given: dict[str, list[list[int]]] = {}
        for _ in range(2):
            task = await front.take()
            sample_id = front.external.tasks[task["session_id"]].sample.sample_id
            client = front.client(task["session_id"])
            first = (await client.chat.completions.create(model="any", messages=task["messages"])).choices[0].message
            for text in ("go on", "go elsewhere", "go home"):
                messages = [*task["messages"], first, {"role": "user", "content": text}]
                await client.chat.completions.create(model="any", messages=messages)
            given[sample_id] = [list(turn.tokens) for turn in front.sessions.get(task["session_id"]).turns]
            status, _ = await front.post(f"/v1/sessions/{task['session_id']}/finish", {"reward": 1.0})
            assert status == 200
        manifest = await front.scene.batch(1)
        assert len(manifest.samples) == 6
        assert {meta.reward for meta in manifest.samples} == {1.0}
        for sample_id, turns in given.items():
            sampled = []
            for meta in manifest.samples:
                if meta.sample_id.startswith(sample_id):
                    arrays = arrays_of(front.scene.store, manifest)[meta.sample_id]
                    response = arrays["tokens"][meta.prompt_length :]
                    marks = zip(response, arrays["sampled"], strict=True)
                    sampled += [token for token, mark in marks if mark]
                    assert response[: len(turns[0])] == turns[0]
            assert sorted(sampled) == sorted(token for turn in turns for token in turn)

    play(act, engines=1, groups=1, size=2, steps=1, branch="all")


def test_a6_a_program_that_gives_up_or_falls_silent_loses_its_sample_under_its_name():
    """Faults: an error at the end; a task that is taken and never heard of; an end without a reply."""

    async def act(front: Front) -> None:
        now = stopped_clock(front)
        given_up, silent = await front.take(), await front.take()
        status, answer = await front.post(f"/v1/sessions/{given_up['session_id']}/finish", {"reward": 1.0})
        assert (status, answer["error"]["code"]) == (400, "nothing_sampled")
        await converse(front, given_up, turns=1, error="the browser crashed")
        now[0] += 100
        await front.scene.until(lambda: front.scene.store.counts().dropped.get("agent_silent", 0) == 1)
        assert front.scene.store.counts().dropped == {"agent_program_error": 1, "agent_silent": 1}
        for task in (given_up, silent):
            status, answer = await front.post(
                "/v1/chat/completions", {"messages": task["messages"]}, task["session_id"]
            )
            assert (status, answer["error"]["code"]) == (410, "session_ended")
        for _ in range(2):
            await converse(front, await front.take(), reward=1.0)
        manifest = await front.scene.batch(1)
        assert len(manifest.samples) == 2
        assert manifest.metrics["gateway/sessions_silent"] == 1
        assert manifest.metrics["gateway/sessions_given_up"] == 1

    play(act, engines=1, groups=1, size=4, steps=1, silent_s=0.1)


def test_a3_a_session_whose_request_is_under_way_is_not_silent():
    """Fault: an engine that takes longer than a program may be silent."""

    async def act(front: Front) -> None:
        now = stopped_clock(front)
        engine = fake_engine_of(front)
        engine.open.clear()
        tasks = [await front.take() for _ in range(2)]
        conversing = [asyncio.ensure_future(converse(front, task, turns=1, reward=1.0)) for task in tasks]
        await engine.running_requests(2)
        now[0] += 100
        await asyncio.sleep(0.3)  # tasks are looked at each 0.1 s
        engine.open.set()
        await asyncio.gather(*conversing)
        assert len((await front.scene.batch(1)).samples) == 2

    play(act, engines=1, groups=1, size=2, steps=1, silent_s=0.1)


def test_tasks_nobody_takes_wait_and_a_program_waits_for_one():
    async def act(front: Front) -> None:
        tasks = [await front.take() for _ in range(2)]
        assert await front.post("/v1/sessions", {"wait_s": 0.05}) == (204, None)
        waiting = asyncio.ensure_future(front.take(session_id="mine"))
        await front.scene.until(lambda: len(front.external._programs) == 1)
        for task in tasks:
            await converse(front, task, reward=1.0)
        await front.scene.batch(1)
        front.scene.scheduler.trained("step-1")
        await front.scene.serve(1)
        task = await waiting
        assert task["session_id"] == "mine"
        await converse(front, task, reward=0.5, correct=False)
        status, answer = await front.post("/v1/sessions", {"session_id": "mine"})
        assert (status, answer["error"]["code"]) == (409, "session_exists")
        status, answer = await front.post("/v1/sessions", {"session_id": "a/b"})
        assert (status, answer["error"]["param"]) == (400, "session_id")

    play(act, engines=1, groups=1, size=2, steps=2)


def test_a6_a_task_on_its_way_to_a_program_that_has_gone_is_given_to_another():
    """Fault: the request for a task is cancelled in the very moment in which the task is granted."""

    async def act(front: Front) -> None:
        external = front.external
        await front.scene.until(lambda: external.waiting == 2)
        while external.waiting:
            await external.take(0)
        gone = asyncio.ensure_future(external.take(5.0))
        stays = asyncio.ensure_future(external.take(5.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(external._programs) == 2
        task = next(iter(external.tasks.values()))
        external._give(task)
        gone.cancel()
        assert await stays is task
        with pytest.raises(asyncio.CancelledError):
            await gone

    play(act, engines=1, groups=1, size=2, steps=1)


def test_a_sample_that_ends_while_its_task_is_on_its_way_is_nobodys():
    """Fault: the run drops the sample in between."""

    async def act(front: Front) -> None:
        external = front.external
        await front.scene.until(lambda: external.waiting == 2)
        while external.waiting:
            await external.take(0)
        taking = asyncio.ensure_future(external.take(5.0))
        await asyncio.sleep(0)
        task = next(iter(external.tasks.values()))
        external._give(task)
        task.ended.cancel()
        assert await taking is None

    play(act, engines=1, groups=1, size=2, steps=1)


def test_held_out_prompts_are_tasks_too_and_go_first():
    async def act(front: Front) -> None:
        evaluation = front.scene.evaluation
        object.__setattr__(evaluation, "agent", front.external)
        front.gateway.texts = {**front.gateway.texts, **{(True, f"h{n}"): f"held out {n}" for n in range(6)}}
        running = asyncio.ensure_future(evaluation.run(EvaluateRequest(0, 10.0)))
        await front.scene.until(lambda: front.external.waiting == 8)
        for number in range(6):
            task = await front.take()
            assert task["evaluation"]
            assert task["prompt"].startswith("held out")
            # the program says what it always says; the evaluation has a temperature of its own
            client = front.client(task["session_id"])
            await client.chat.completions.create(model="any", messages=task["messages"], temperature=1.0)
            assert fake_engine_of(front).requests[-1]["sampling_params"]["temperature"] == 0.0
            await front.post(f"/v1/sessions/{task['session_id']}/finish", {"reward": float(number < 3)})
        reply = await running
        assert (reply.accuracy, reply.prompts, reply.failures) == (0.5, 6, 0)
        assert not (await front.take())["evaluation"]

    play(act, engines=1, groups=1, size=2, steps=1, answer=saying(lambda prompt, seed: "x"))


def test_a5_tasks_end_with_the_run():
    """Fault: the role ends while programs are at work."""

    async def act(front: Front) -> None:
        task = await front.take()
        engine = fake_engine_of(front)
        engine.open.clear()
        talking = asyncio.ensure_future(
            front.post("/v1/chat/completions", {"messages": task["messages"]}, task["session_id"])
        )
        await engine.running_requests(1)
        front.gateway.stopping = True
        status, answer = await front.post("/v1/sessions", {})
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        await front.scene.scheduler.close()
        assert front.external.tasks == {}
        assert len(front.sessions) == 0
        engine.open.set()
        await talking

    play(act, engines=1, groups=1, size=2, steps=1)
