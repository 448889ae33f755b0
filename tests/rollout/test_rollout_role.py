"""The rollout role as a process: the trainer's own client on one side, fake engines on the other, real rewards."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import transformers
import yaml
from fake_engine import FakeEngine
from tiny_models import make_tiny_model

from slimerl.engine.registration import register
from slimerl.resilience.deadline import Deadline
from slimerl.rollout.__main__ import main
from slimerl.rollout.journal_file import TAKE_OVER
from slimerl.samples.messages import (
    ADDRESS_FILE,
    TOKEN_HEADER,
    EngineState,
    FetchRequest,
    HoldRequest,
    Refusal,
    ReleaseRequest,
    ServiceAddress,
    decode,
    encode,
)
from slimerl.samples.messages import Path as Endpoint
from slimerl.samples.sample import response_arrays
from slimerl.spec import load_spec
from slimerl.training.rollout_client import RolloutClient, ServiceFailed

START_S = 120.0
GROUPS, SIZE, STEPS = 3, 4, 3


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1, hidden_size=16)


@dataclass
class Files:
    """A spec and its data in a directory of their own."""

    directory: Path
    model_path: Path

    def write(self, rows: Sequence[str] | None = None) -> Path:
        sums = [(first, second) for first in range(4) for second in range(3)]
        lines = [
            json.dumps({"id": f"{first}+{second}", "prompt": f"{first}+{second}=", "answer": str(first + second)})
            for first, second in sums
        ]
        (self.directory / "train.jsonl").write_text("\n".join(rows if rows is not None else lines))
        (self.directory / "heldout.jsonl").write_text("\n".join(lines[:5]))
        spec = {
            "name": "role-test",
            "output_dir": str(self.directory / "run"),
            "model": {"path": str(self.model_path)},
            "data": {
                "train_path": str(self.directory / "train.jsonl"),
                "eval_path": str(self.directory / "heldout.jsonl"),
                "max_prompt_tokens": 8,
            },
            "training": {"steps": STEPS, "prompts_per_step": GROUPS},
            "rollout": {"samples_per_prompt": SIZE, "max_new_tokens": 8},
            "engine": {"replicas": 2},
            "deadlines": {"request_s": 20.0, "start_s": START_S},
        }
        path = self.directory / "spec.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"


@pytest.fixture
def files(tmp_path: Path, model_path: Path) -> Files:
    return Files(tmp_path, model_path)


class Role:
    """`python -m slimerl.rollout SPEC`, its log, and what must be true once it has ended."""

    def __init__(self, spec: Path, *arguments: str) -> None:
        self.log = spec.with_name("role.log")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "slimerl.rollout", str(spec), *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def workers(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def exit_code(self, within_s: float = 15.0) -> int:
        return self.process.wait(within_s)

    def text(self) -> str:
        return self.log.read_text()


@pytest.fixture
def start(files: Files) -> Iterator[Callable[..., Role]]:
    roles: list[Role] = []

    def started(spec: Path, *arguments: str) -> Role:
        roles.append(Role(spec, *arguments))
        return roles[-1]

    yield started
    for role in roles:
        if role.process.poll() is None:
            role.process.kill()
        role.process.wait()


def gone(pids: Sequence[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def arithmetic(model_path: Path) -> Callable[[Sequence[int], int], list[int]]:
    """Right for even seeds, wrong for most odd ones, and sometimes no number at all."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)

    def answer(prompt: Sequence[int], seed: int) -> list[int]:
        first, second = tokenizer.decode(prompt).rstrip("=").split("+")
        total = int(first) + int(second)
        text = str(total) if seed % 2 == 0 else "none" if seed % 5 == 0 else str(total + 1)
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    return answer


def with_engines(files: Files, scene: Callable[[RolloutClient, list[FakeEngine]], Coroutine[Any, Any, None]]) -> None:
    """Play a scene with two engines registered and the trainer's client connected."""

    async def run() -> None:
        async with asyncio.timeout(2 * START_S), AsyncExitStack() as stack:
            answer = arithmetic(files.model_path)
            engines = [await stack.enter_async_context(FakeEngine(f"engine-{number}", answer)) for number in range(2)]
            deadline = Deadline("the rollout role to start", START_S)
            for engine in engines:
                await register(engine.info, files.run_dir, deadline)
            await scene(await asyncio.to_thread(RolloutClient.connect, files.run_dir, deadline, 10.0), engines)

    asyncio.run(run())


async def sync(client: RolloutClient, engines: list[FakeEngine], version: int) -> None:
    """What the trainer's weight sync says to the rollout role."""
    reply = await asyncio.to_thread(client.hold, HoldRequest(version, 10.0))
    assert sorted(engine.url for engine in reply.engines) == sorted(engine.url for engine in engines)
    assert all(engine.admin_key for engine in reply.engines)
    for engine in engines:
        engine.version = str(version)
    whole = [engine.engine_id for engine in engines]
    await asyncio.to_thread(client.release, ReleaseRequest(reply.lease_id, version, whole))


async def train_step(client: RolloutClient, step: int) -> None:
    manifest = await asyncio.to_thread(client.next_batch, step, 20.0)
    assert Counter(sample.group_id for sample in manifest.samples).most_common()[-1][1] >= 2
    assert len({sample.group_id for sample in manifest.samples}) == GROUPS
    payloads = await asyncio.to_thread(client.fetch, [sample.sample_id for sample in manifest.samples])
    for meta, payload in zip(manifest.samples, payloads, strict=True):
        arrays = response_arrays(payload)
        response = arrays["tokens"][meta.prompt_length :]
        assert len(response) == len(arrays["behavior_logprobs"]) == meta.response_length
        assert arrays["versions"] == [step - 1] * len(response)
        assert response[-1] == 1, "the end-of-sequence token belongs to the response"
        assert meta.reward == float(bool(meta.correct))
    assert 0 < manifest.metrics["rollout/accuracy"] < 1
    assert manifest.metrics["rollout/seconds"] > 0
    assert manifest.metrics["rollout/staleness_max"] == 0
    await asyncio.to_thread(client.trained, manifest.batch_id, step)


async def take_second(client: RolloutClient) -> list[Any]:
    manifest = await asyncio.to_thread(client.next_batch, 2, 20.0)
    ids = [sample.sample_id for sample in manifest.samples]
    return [manifest.batch_id, manifest.samples, await asyncio.to_thread(client.fetch, ids)]


async def ask_wrongly(files: Files, client: RolloutClient) -> None:
    """Every refusal has a status and a reason."""
    address = ServiceAddress(**json.loads((files.run_dir / ADDRESS_FILE).read_text()))

    def refusal(path: str, body: bytes | None = None, token: str = address.token) -> tuple[int, str]:
        request = urllib.request.Request(address.url + path, body, {TOKEN_HEADER: token})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        return caught.value.code, decode(caught.value.read(), Refusal).error

    async def refused(*arguments: Any) -> tuple[int, str]:
        return await asyncio.to_thread(refusal, *arguments)

    hold = encode(HoldRequest(0, 1.0))
    assert (await refused(Endpoint.HOLD, hold, "guess"))[0] == 401
    assert (await refused(Endpoint.HEALTH, None, ""))[0] == 401
    assert (await refused("/nowhere"))[0] == 404
    assert (await refused(Endpoint.HOLD))[0] == 405
    status, error = await refused(Endpoint.HOLD, b"\x81\xa7version\xa1x")
    assert (status, "version" in error) == (400, True)
    status, error = await refused(Endpoint.FETCH_SAMPLES, encode(FetchRequest(["a", "b"])))
    assert (status, error) == (404, "not in the store as ready samples: a, b")
    with pytest.raises(ServiceFailed, match="409: /batches/next: no weights have been released yet"):
        await asyncio.to_thread(client.next_batch, 1, 1.0)
    with pytest.raises(ServiceFailed, match="409: /batches/trained: batch step-9 is not leased"):
        await asyncio.to_thread(client.trained, "step-9", 1)
    with pytest.raises(ServiceFailed, match="409: /evaluate: no weights have been released yet"):
        await asyncio.to_thread(client.evaluate, 0, 1.0)


def test_a_run_from_the_first_sync_to_the_shutdown(files, start):
    role = start(files.write())

    async def scene(client: RolloutClient, engines: list[FakeEngine]) -> None:
        assert oct((files.run_dir / ADDRESS_FILE).stat().st_mode)[-3:] == "600"
        workers = role.workers()
        await ask_wrongly(files, client)
        await sync(client, engines, 0)
        await register(engines[0].info, files.run_dir, Deadline("a repeated registration", 10.0))
        before = await asyncio.to_thread(client.evaluate, 0, 20.0)
        assert (before.version, before.prompts + before.failures) == (0, 5)
        assert before.failures == 0
        for step in range(1, STEPS + 1):
            await train_step(client, step)
            await sync(client, engines, step)
        after = await asyncio.to_thread(client.evaluate, STEPS, 20.0)
        # The engines' answers are keyed by seed, and seeds of held-out prompts do not change.
        assert (after.version, after.accuracy) == (STEPS, before.accuracy)
        status = await asyncio.to_thread(client.status)
        assert status.admitted == status.trained + sum(status.dropped.values()) == GROUPS * SIZE * STEPS
        assert (status.running, status.buffered, status.version) == (0, 0, STEPS)
        assert {engine.state for engine in status.engines} == {EngineState.SERVING}
        assert sum(engine.calls["/generate"] for engine in engines) == GROUPS * SIZE * STEPS + 2 * 5
        await asyncio.to_thread(client.shutdown)
        assert await asyncio.to_thread(role.exit_code) == 0, role.text()
        assert workers
        assert gone(workers)

    with_engines(files, scene)
    assert not (files.run_dir / ADDRESS_FILE).exists()
    assert "Traceback" not in role.text()


def test_an_engine_that_evaluates_alone_keeps_its_version_while_the_other_goes_on(files, start):
    apart = ("evaluation.engines=1", "evaluation.background=true", "evaluation.every_steps=3")
    role = start(files.write(), "cluster.placement=disaggregated", *apart)

    async def scene(client: RolloutClient, engines: list[FakeEngine]) -> None:
        of_rollouts, evaluator = engines
        await sync(client, engines, 0)
        evaluator.open.clear()
        for step in (1, 2):
            assert await asyncio.to_thread(client.begin_evaluation, 0, START_S), "it has not ended"
            await train_step(client, step)
            await sync(client, [of_rollouts], step)
        evaluator.open.set()
        before = await asyncio.to_thread(client.evaluate, 0, 20.0)
        assert (before.version, before.prompts, before.failures) == (0, 5, 0)
        await train_step(client, 3)
        await sync(client, engines, 3)
        after = await asyncio.to_thread(client.evaluate, 3, 20.0)
        assert (after.version, after.accuracy) == (3, before.accuracy)
        assert [engine.calls["/generate"] for engine in engines] == [GROUPS * SIZE * STEPS, 2 * 5]
        await asyncio.to_thread(client.shutdown)
        assert await asyncio.to_thread(role.exit_code) == 0, role.text()

    with_engines(files, scene)
    assert "Traceback" not in role.text()


def test_a5_sigterm_ends_the_role_at_once_and_refuses_whoever_waits(files, start):
    """Fault: SIGTERM while engines compute, the trainer waits and a reward worker is idle."""
    role = start(files.write())

    async def scene(client: RolloutClient, engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.open.clear()
        await sync(client, engines, 0)
        waiting = asyncio.ensure_future(asyncio.to_thread(client.next_batch, 1, 1000.0))
        await engines[0].running_requests(GROUPS * SIZE // 2)
        workers = role.workers()
        begun = time.monotonic()
        role.process.send_signal(signal.SIGTERM)
        with pytest.raises(ServiceFailed, match=r"refused with 503.*shutting down"):
            await waiting
        assert await asyncio.to_thread(role.exit_code, 15.0) == 0, role.text()
        assert time.monotonic() - begun < 15
        assert gone(workers)

    with_engines(files, scene)
    assert not (files.run_dir / ADDRESS_FILE).exists()


def test_r3_unusable_data_ends_the_role_before_it_serves(files, capsys):
    spec = files.write(['{"id": "a", "prompt": "111111+1=", "answer": "111112"}'])
    assert main(load_spec(spec)) == 2
    told = capsys.readouterr().err
    assert "train.jsonl:1: prompt of id 'a' has 9 tokens, more than data.max_prompt_tokens = 8" in told
    assert not (files.run_dir / ADDRESS_FILE).exists()


def test_a5_the_role_ends_with_its_parent_and_its_workers_with_it(files):
    """Fault: SIGKILL to whoever started the role."""
    spec = files.write()
    program = (
        "import subprocess, sys, time\n"
        f"command = [sys.executable, '-m', 'slimerl.rollout', {str(spec)!r}]\n"
        "role = subprocess.Popen(command, stderr=subprocess.DEVNULL)\n"
        "print(role.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    role_pid = int(parent.stdout.readline())
    Deadline("the role to start", START_S).wait_until((files.run_dir / ADDRESS_FILE).exists)
    family = [role_pid, *(child.pid for child in psutil.Process(role_pid).children(recursive=True))]
    assert len(family) == 2
    parent.kill()
    parent.wait(10)
    Deadline("the role to end with its parent", 10).wait_until(lambda: gone(family))


def test_a2_a_killed_role_that_is_started_again_hands_out_the_same_batch_and_goes_on(files, start):
    """Fault: SIGKILL after step 2 was handed out and before it was trained; engines and the trainer's client stay."""
    role = start(files.write())

    async def scene(_: RolloutClient, engines: list[FakeEngine]) -> None:
        deadline = Deadline("the role", START_S)
        client = await asyncio.to_thread(RolloutClient.connect, files.run_dir, deadline, 10.0, START_S)
        await sync(client, engines, 0)
        await train_step(client, 1)
        await sync(client, engines, 1)
        handed = await take_second(client)
        role.process.kill()
        role.process.wait(10)
        start(files.write(), TAKE_OVER)
        assert await take_second(client) == handed
        status = await asyncio.to_thread(client.status)
        assert (status.trained, status.buffered) == (GROUPS * SIZE, GROUPS * SIZE)
        assert (status.version, status.returning) == (1, ["engine-0", "engine-1"])
        for engine, version in zip(engines, (1, -1), strict=True):
            await register(msgspec.structs.replace(engine.info, version=version), files.run_dir, deadline)
        status = await asyncio.to_thread(client.status)
        assert [engine.state for engine in status.engines] == [EngineState.SERVING, EngineState.JOINING]
        await asyncio.to_thread(client.trained, "step-2", 2)
        with pytest.raises(ServiceFailed, match=r"409: .*step-2 was trained already"):
            await asyncio.to_thread(client.next_batch, 2, 1.0)
        await sync(client, engines, 2)
        await train_step(client, 3)
        status = await asyncio.to_thread(client.status)
        assert status.admitted == status.trained + sum(status.dropped.values()) == GROUPS * SIZE * STEPS

    with_engines(files, scene)


def test_a_role_that_is_asked_to_begin_anew_gives_up_what_it_has_and_goes_on_from_an_earlier_step(files, start):
    """The same process, at another address; it takes a version older than its engines served."""
    role = start(files.write())

    async def scene(client: RolloutClient, engines: list[FakeEngine]) -> None:
        await sync(client, engines, 0)
        await train_step(client, 1)
        state = await asyncio.to_thread(client.state)
        await sync(client, engines, 1)
        handed = await take_second(client)
        await asyncio.to_thread(client.trained, "step-2", 2)
        await sync(client, engines, 2)
        await asyncio.to_thread(client.begin_anew, files.run_dir)
        deadline = Deadline("the role to serve again", START_S)
        for one in engines:
            await register(msgspec.structs.replace(one.info, version=2), files.run_dir, deadline)
        again = await asyncio.to_thread(RolloutClient.connect, files.run_dir, deadline, 10.0)
        assert (await asyncio.to_thread(again.status)).admitted == 0
        await asyncio.to_thread(again.restore, state)
        await sync(again, engines, 1)
        assert await take_second(again) == handed
        assert again.address.pid == role.process.pid

    with_engines(files, scene)
