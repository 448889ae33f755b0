"""The sample store against its goals, each printed with what was measured, and whether it is reached.

    python tools/bench_store.py
    python tools/bench_store.py --samples 100000      # a shorter look

Rows, each in processes of its own:

    payload, one leader    MB/s of payload that a trainer's client fetches from the control service over loopback
    payload, two leaders   the same, both at once (no goal: two readers share the machine's cores with the service)
    metadata               transitions of samples per second from admission to training, the journal written meanwhile
    memory, queued         bytes of so many samples that are admitted
    memory, finished       the same, with their rewards, of one token each; payload counts as well

The clock is the wall's; "of a core" is the same per second of the process's own CPU time, which tells what a busy
machine took away. Exit code 1: a goal is missed.
"""

import argparse
import asyncio
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiohttp import web
from bench_router_http import cpu_s

from slimerl.engine.protocol import SamplingParams
from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.dispatch import Dispatcher
from slimerl.rollout.engines import EngineClients
from slimerl.rollout.evaluation import Evaluation
from slimerl.rollout.journal_file import JournalFile
from slimerl.rollout.judge import Judge
from slimerl.rollout.loop_lag import LoopLag
from slimerl.rollout.prompts import Prompt, PromptStream
from slimerl.rollout.router import LeastLoaded
from slimerl.rollout.scheduler import Scheduler, SchedulerSettings
from slimerl.rollout.service import ControlService
from slimerl.rollout.weights import WeightHold
from slimerl.samples.journal import Books
from slimerl.samples.messages import ServiceAddress
from slimerl.samples.sample import Sample
from slimerl.samples.store import SampleStore
from slimerl.training.rollout_client import RolloutClient

MB_PER_S, OPERATIONS_PER_S, BYTES = 500.0, 20_000.0, 1e9
GROUP = 8
PROMPT_TOKENS, RESPONSE_TOKENS = 512, 8192
PAYLOAD_SAMPLES = 2048
FETCH_S = 4.0
TRANSITIONS = 6
"""Of a sample's life: admitted, started, generated, rewarded, leased, trained."""
METADATA_SAMPLES = 40_000
BATCH_GROUPS = 128
REQUEST_S = 60.0
TOKEN = "bench"


@dataclass(frozen=True)
class Found:
    value: float
    per_core: float = 0.0


def admit(store: SampleStore, number: int, prompt: tuple[int, ...]) -> list[Sample]:
    group_id = f"0/prompt-{number}"
    samples = [Sample(f"{group_id}/{each}", group_id, f"prompt-{number}", prompt) for each in range(GROUP)]
    store.admit(group_id, samples, version=0)
    return samples


def finish(store: SampleStore, sample: Sample, response: list[int], logprobs: list[float]) -> None:
    store.start(sample.sample_id)
    sample.append(response, logprobs, 0)
    store.generated(sample.sample_id)
    sample.reward, sample.correct, sample.finish_reason = 1.0, True, "stop"
    store.rewarded(sample.sample_id)


# --- payload


def serve(ready: Connection) -> None:
    """A rollout role's control service with a full store, on a free port."""
    store = SampleStore()
    prompt, response = tuple(range(PROMPT_TOKENS)), list(range(RESPONSE_TOKENS))
    for number in range(PAYLOAD_SAMPLES // GROUP):
        for sample in admit(store, number, prompt):
            finish(store, sample, response, [-0.5] * RESPONSE_TOKENS)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(store, ready))


async def _serve(store: SampleStore, ready: Connection) -> None:
    router, clients, params = LeastLoaded(1), EngineClients(REQUEST_S), SamplingParams(1)
    dispatcher = Dispatcher(router, clients, REQUEST_S)
    judge: Any = Judge(str, None)  # type: ignore[arg-type]  # nothing is judged here
    prompts = PromptStream([Prompt("p", (1,), "")], 0)
    scheduler = Scheduler(
        SchedulerSettings(1, GROUP, 0, params), prompts, StalenessGate(1, 0, 1), store, dispatcher, judge
    )
    weights = WeightHold(dispatcher, clients, 1, REQUEST_S)
    evaluation = Evaluation([], params, 0, dispatcher, judge)
    service = ControlService(TOKEN, router, clients, scheduler, weights, evaluation, LoopLag())
    runner = web.AppRunner(service.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready.send(runner.addresses[0][1])
    await asyncio.Event().wait()


def fetch(port: int) -> Found:
    """MB/s, for `FETCH_S` seconds."""
    client = RolloutClient(ServiceAddress(f"http://127.0.0.1:{port}", TOKEN, 0), REQUEST_S)
    ids = [f"0/prompt-{number}/{each}" for number in range(PAYLOAD_SAMPLES // GROUP) for each in range(GROUP)]
    size, begun, cpu = 0, time.monotonic(), time.process_time()
    while time.monotonic() - begun < FETCH_S:
        size += sum(payload.size for payload in client.fetch(ids))
    return Found(size / 1e6 / (time.monotonic() - begun), size / 1e6 / (time.process_time() - cpu))


def _fetch_and_tell(port: int, results: Connection) -> None:
    results.send(fetch(port))


def payload_rows(say: Callable[[str], None]) -> tuple[Found, float, float]:
    """MB/s of one leader, of a core of the service meanwhile, and of two leaders together."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(there,), daemon=True)
    server.start()
    say(f"packing {PAYLOAD_SAMPLES} samples of {PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens")
    try:
        if not here.poll(2 * REQUEST_S):
            raise SystemExit(f"the service did not start within {2 * REQUEST_S:g} s")
        port = here.recv()
        say("fetching with one leader, then with two")
        cpu = cpu_s(server.pid or 0)
        [one] = _fetched(port, 1)
        served = one.value * FETCH_S / (cpu_s(server.pid or 0) - cpu)
        return one, served, sum(each.value for each in _fetched(port, 2))
    finally:
        server.terminate()
        server.join()


def _fetched(port: int, leaders: int) -> list[Found]:
    with ThreadPoolExecutor(leaders) as pool:
        return list(pool.map(lambda _: in_process(_fetch_and_tell, port), range(leaders)))


def in_process(target: Callable[..., None], *arguments: Any) -> Any:
    """What `target` sends, from a process of its own: nothing of another row is in its memory."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=target, args=(*arguments, there), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise SystemExit(f"the process of {target.__name__} ended without a result; its error stands above") from None
    finally:
        process.join()


# --- metadata


def live_and_die(directory: str, results: Connection) -> None:
    store, journal = SampleStore(), JournalFile(Path(directory))
    journal.begin(Books(0, 0, 0, {}, {}))
    journal.publish()
    store.note = journal.note
    begun, cpu = time.monotonic(), time.process_time()
    groups, taken = METADATA_SAMPLES // GROUP, 0
    for number in range(groups):
        for sample in admit(store, number, (1, 2, 3, 4)):
            finish(store, sample, [5, 6, 7, 8], [-0.5] * 4)
        if len(store.ready) >= BATCH_GROUPS:
            taken += 1
            chosen = [group.group_id for group in store.unleased() if group.ready][:BATCH_GROUPS]
            store.lease(f"step-{taken}", chosen)
            store.trained(f"step-{taken}")
    journal.close()
    operations = TRANSITIONS * METADATA_SAMPLES
    results.send(Found(operations / (time.monotonic() - begun), operations / (time.process_time() - cpu)))


# --- memory


def fill(samples: int, finished: bool, results: Connection) -> None:
    before, store = resident_bytes(), SampleStore()
    prompt = (1, 2, 3, 4)
    for number in range(samples // GROUP):
        for sample in admit(store, number, prompt):
            if finished:
                finish(store, sample, [5], [-0.5])
    results.send(Found(float(resident_bytes() - before)))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the memory rows")
    samples = parser.parse_args().samples
    begun = time.monotonic()
    reached = []

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:5.1f} s] {text}", file=sys.stderr, flush=True)

    def row(name: str, text: str, passed: bool | None) -> None:
        reached.append(passed is not False)
        verdict = "" if passed is None else "pass" if passed else "FAIL"
        print(f"{name:22} {text:88} {verdict}", flush=True)

    multiprocessing.set_start_method("spawn")
    one, served, two = payload_rows(say)
    text = f"{one.value:,.0f} MB/s (goal: at least {MB_PER_S:,.0f})"
    cores = f"; of a core: {one.per_core:,.0f} the client, {served:,.0f} the service"
    row("payload, one leader", text + cores, one.value >= MB_PER_S)
    row("payload, two leaders", f"{two:,.0f} MB/s together", None)
    say(f"{METADATA_SAMPLES} samples live and die, journaled")
    with tempfile.TemporaryDirectory() as directory:
        found = in_process(live_and_die, directory)
    text = f"{found.value:,.0f} operations/s (goal: at least {OPERATIONS_PER_S:,.0f}); of a core: {found.per_core:,.0f}"
    row("metadata", text, found.value >= OPERATIONS_PER_S)
    limit = BYTES * samples / 1e6
    for name, finished in (("queued", False), ("finished", True)):
        say(f"{samples} samples {name}")
        size = in_process(fill, samples, finished).value
        each = f"{size / samples:,.0f} bytes each"
        row(f"memory, {name}", f"{size / 1e9:.2f} GB (goal: at most {limit / 1e9:.2f}); {each}", size <= limit)
    say("done")
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
