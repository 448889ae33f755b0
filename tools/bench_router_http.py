"""Routers behind HTTP side by side: hit rate against an oracle, spread of requests, CPU time per request.

    python tools/bench_router_http.py                # the gateway, sglang-router 0.3.2 and smg 1.13.0, on one trace
    python tools/bench_router_http.py --shape skewed --concurrency 32 --only cache_aware
    python tools/bench_router_http.py --url http://127.0.0.1:30000 --pid 1234    # any router that runs already

Mock engines run in another process (bench_router_mock.py). Each peer is installed into a virtual environment of its own
under --cache, never into this one. CPU time is what the operating system counted for the router's processes; ratios are
of rows of one run. `gateway` is slimerl's, whole: keyed by session, sent ids, recording every turn; the peers are sent
text, which they route by. `raw pass-through` reads nothing and chooses nothing: its time is that of the sockets.
`direct` rows need no router: the client chooses; their time is that of the decisions alone.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any
from zlib import crc32

import aiohttp
import msgspec
import psutil
from bench_gateway_server import KEY, RAW, VOCABULARY, server
from bench_goals import Goal, judged

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.router import Query, Router
from slimerl.samples.messages import EngineInfo
from slimerl.simulation.rollout_routers import RoundRobin
from slimerl.simulation.rollout_run import end_slot
from slimerl.simulation.rollout_scenarios import CONCURRENCIES, ROUTING_SHAPES
from slimerl.simulation.rollout_trace import Conversation, Shape, Trace, draw_trace

START_S = 60.0
REQUEST_S = 120.0
GATEWAY, REFERENCE = "gateway", "sglang-router cache_aware"
GOAL_CPU, GOAL_HIT, GOAL_SPREAD = 0.5, 0.99, 1.10
"""R1: of the reference's CPU time; R2: of the oracle's hit rate, and requests of the busiest engine over the mean."""


@dataclass(frozen=True)
class Peer:
    """A router from PyPI. `{urls}` in its arguments stands for the engines' URLs, one argument each."""

    name: str
    requirement: str
    arguments: tuple[str, ...]


def _peers(policy: str) -> tuple[Peer, ...]:
    common = ("--policy", policy, "--host", "127.0.0.1", "--port", "{port}", "--worker-urls", "{urls}")
    return (
        Peer(f"sglang-router {policy}", "sglang-router==0.3.2", ("-m", "sglang_router.launch_router", *common)),
        Peer(f"smg {policy}", "smg==1.13.0", ("-m", "smg.launch_router", *common)),
    )


PEERS = (*_peers("cache_aware"), *_peers("round_robin"))


@dataclass(frozen=True)
class Target:
    """What a run is sent to: a router's `url`, or engines that `router` chooses in process. `key`: of a gateway, which
    is sent ids."""

    url: str | None = None
    pid: int | None = None
    router: Router | None = None
    key: str = ""


@dataclass(frozen=True)
class Outcome:
    requests: tuple[int, ...]
    """By engine."""
    hit_rate: float
    oracle: float
    cpu_us: float | None
    """Per request: of the router's processes, or of the decisions in process."""
    seconds: float

    @property
    def spread(self) -> float:
        return max(self.requests) * len(self.requests) / sum(self.requests)

    @property
    def over_oracle(self) -> float:
        return self.hit_rate / self.oracle


@dataclass(frozen=True)
class Row:
    router: str
    shape: str
    concurrency: int
    outcome: Outcome

    def __str__(self) -> str:
        one = self.outcome
        cpu = f"{one.cpu_us:.0f}" if one.cpu_us is not None else "-"
        requests = f"{min(one.requests)}..{max(one.requests)}"
        return (
            f"{self.router:<28}{self.concurrency:>8}{one.hit_rate:>8.4f}{one.over_oracle:>9.4f}{requests:>12}"
            f"{one.spread:>9.3f}{cpu:>8}{one.seconds:>7.1f}"
        )


# --- processes


@contextmanager
def mock_engines(engines: int, time_scale: float, *arguments: str) -> Iterator[list[str]]:
    """Their URLs."""
    command = [sys.executable, str(Path(__file__).with_name("bench_router_mock.py"))]
    command += ["--engines", str(engines), "--time-scale", str(time_scale), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    try:
        if process.stdout is None:
            raise RuntimeError("the mock engines have no standard output")
        urls = []
        while (line := process.stdout.readline().strip()) != "ready":
            if not line:
                raise RuntimeError(f"the mock engines ended with {process.wait()} before they were ready")
            urls.append(line)
        yield urls
    finally:
        process.terminate()
        process.wait()


@contextmanager
def running(peer: Peer, urls: list[str], cache: Path) -> Iterator[tuple[str, int]]:
    """A peer's URL and process id."""
    python = _installed(peer, cache)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python)]
    for argument in peer.arguments:
        command += urls if argument == "{urls}" else [argument.replace("{port}", str(port))]
    log = cache / f"{peer.name.replace(' ', '-')}.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError(f"{peer.name}: {error}; the end of {log}:\n{log.read_text()[-2000:]}") from error
    finally:
        for child in _processes(process.pid):
            child.kill()
        process.wait()


def _installed(peer: Peer, cache: Path) -> Path:
    """The Python of the peer's own environment, made where there is none."""
    home = cache / peer.requirement.replace("==", "-")
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        print(f"installing {peer.requirement} into {home}", flush=True)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", peer.requirement], check=True, timeout=600)
        (home / "installed").touch()
    return python


def _processes(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(pid: int) -> float:
    """CPU time of a process and its children so far."""
    return sum(sum(process.cpu_times()[:2]) for process in _processes(pid))


# --- load


@dataclass
class Client:
    """Hands a trace out to `choose`'s URL, with so many conversations under way at once."""

    session: aiohttp.ClientSession
    as_text: bool
    key: str
    choose: Callable[[Query], tuple[str, Callable[[int], None]]]
    """For a query: the URL, and what to call with the number of generated tokens once it is answered."""

    async def run(self, trace: Trace, concurrency: int) -> None:
        waiting = iter(trace.conversations)

        async def worker() -> None:
            for one in waiting:
                await self._converse(one)

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    async def _converse(self, one: Conversation) -> None:
        ids = [token for segment in one.opening for token in spread_ids(segment.key, segment.length)]
        for turn in one.turns:
            if turn.observation is not None:
                ids += spread_ids(turn.observation.key, turn.observation.length)
            url, done = self.choose(Query(one.session, one.group, tuple(ids), turn.answer))
            try:
                ids += await self._generate(url, one.session, ids, turn.answer)
            finally:
                done(turn.answer)

    async def _generate(self, url: str, session: str, ids: list[int], new: int) -> list[int]:
        body: dict[str, Any] = {"sampling_params": {"max_new_tokens": new, "ignore_eos": True}, "stream": False}
        if self.as_text:
            body["text"] = " ".join(map(str, ids))
        else:
            body["input_ids"] = ids
        headers = {"content-type": "application/json", "x-session-id": session, "authorization": f"Bearer {self.key}"}
        data = msgspec.json.encode(body)
        async with self.session.post(f"{url}/generate", data=data, headers=headers) as response:
            answer = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{url}/generate answered {response.status}: {answer[:300]!r}")
            return msgspec.json.decode(answer)["output_ids"]


def spread_ids(key: str, count: int) -> list[int]:
    """Ids of a segment, as varied as text."""
    first = crc32(key.encode()) % 100_003
    return [(first * 31 + position * 7919) % 150_000 for position in range(count)]


async def measure(trace: Trace, concurrency: int, urls: list[str], target: Target, as_text: bool) -> Outcome:
    """One run of a trace, from empty caches."""
    timeout, pid = aiohttp.ClientTimeout(total=REQUEST_S), target.pid
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await _until_healthy(session, target.url or urls[0])
        await (await session.post(f"{urls[0]}/mock/reset")).read()
        chosen_in = [0.0]
        choose = _chooser(target.url, urls, target.router, chosen_in)
        client = Client(session, as_text and not target.key, target.key, choose)
        before, start = cpu_s(pid) if pid else 0.0, perf_counter()
        await client.run(trace, concurrency)
        seconds = perf_counter() - start
        spent = cpu_s(pid) - before if pid else chosen_in[0]
        cpu = spent / trace.requests * 1e6 if spent else None
        async with session.get(f"{urls[0]}/mock/counts") as response:
            counts = msgspec.json.decode(await response.read())
    engines, oracle = counts["engines"], counts["oracle"]
    hit = sum(one["cached_tokens"] for one in engines) / sum(one["prompt_tokens"] for one in engines)
    best = oracle["cached_tokens"] / oracle["prompt_tokens"]
    return Outcome(tuple(one["requests"] for one in engines), hit, best, cpu, seconds)


def _chooser(
    url: str | None, urls: list[str], router: Router | None, spent_s: list[float]
) -> Callable[[Query], tuple[str, Callable[[int], None]]]:
    """`spent_s[0]` grows by the seconds that a router in process takes."""
    if url is not None:
        return lambda query: (url, lambda generated: None)
    if router is None:
        raise ValueError("neither a router's URL nor a router in process")
    for number, engine_url in enumerate(urls):
        router.join(EngineInfo(str(number), engine_url, "", 1))
    router.release(0, [str(number) for number in range(len(urls))], {})

    def choose(query: Query) -> tuple[str, Callable[[int], None]]:
        start = thread_time()
        engine_id = router.route(query)
        if engine_id is None:
            raise RuntimeError("no engine has room")
        slot = router.reserve(engine_id, query)
        spent_s[0] += thread_time() - start

        def done(generated: int) -> None:
            start = thread_time()
            end_slot(router, slot, generated)
            spent_s[0] += thread_time() - start

        return urls[int(engine_id)], done

    return choose


async def _until_healthy(session: aiohttp.ClientSession, url: str) -> None:
    deadline = Deadline(f"{url} to be healthy", START_S)
    while True:
        try:
            async with session.get(f"{url}/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        deadline.check()
        await asyncio.sleep(0.2)


# --- the table


def main() -> int:
    options = read_options()
    shape = next(one for one in ROUTING_SHAPES if one.name == options.shape)
    return judged(goals(compare(options, shape, options.concurrency, options.only)))


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Default: of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="measure the router that runs here, instead of the peers")
    parser.add_argument("--pid", type=int, help="its process, for its CPU time")
    parser.add_argument("--key", default="", help="its key, where it is a gateway")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "slimerl" / "routers")
    parser.add_argument("--shape", choices=[shape.name for shape in ROUTING_SHAPES], default="design")
    parser.add_argument("--concurrency", type=int, nargs="*", default=CONCURRENCIES)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--time-scale", type=float, default=0.02)
    parser.add_argument("--ids", action="store_true", help="send input_ids; text otherwise, which the peers route by")
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name contains one of these")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, shape: Shape, concurrencies: Sequence[int], only: Sequence[str]) -> list[Row]:
    """Measure and print rows whose name contains one of `only`."""
    trace = draw_trace(shape, 0)
    options.cache.mkdir(parents=True, exist_ok=True)
    print(f"\n{shape.name}: {trace.requests} requests on {options.engines} mock engines behind HTTP")
    print(f"{'router':<28}{'at once':>8}{'hit':>8}{'/oracle':>9}{'requests':>12}{'max/mean':>9}{'CPU us':>8}{'s':>7}")
    rows = []
    with mock_engines(options.engines, options.time_scale, "--vocabulary", str(VOCABULARY)) as urls:
        for concurrency in concurrencies:
            for name, make in _targets(options, trace, urls):
                if not any(each in name for each in only):
                    continue
                with make() as target:
                    outcome = asyncio.run(measure(trace, concurrency, urls, target, not options.ids))
                rows.append(Row(name, shape.name, concurrency, outcome))
                print(rows[-1], flush=True)
    return rows


def _targets(
    options: argparse.Namespace, trace: Trace, urls: list[str]
) -> list[tuple[str, Callable[[], AbstractContextManager[Target]]]]:
    """By name, each to be started."""

    @contextmanager
    def own(row: str) -> Iterator[Target]:
        with server(row, urls) as (url, pid):
            yield Target(url, pid, key=KEY)

    @contextmanager
    def peer(one: Peer) -> Iterator[Target]:
        with running(one, urls, options.cache) as (url, pid):
            yield Target(url, pid)

    direct: list[tuple[str, Callable[[], AbstractContextManager[Target]]]] = [
        ("direct, round robin", lambda: nullcontext(Target(router=RoundRobin(1 << 30)))),
        ("direct, KV-aware", lambda: nullcontext(Target(router=KvRouter(1 << 30, trace.siblings)))),
    ]
    if options.url:
        return [*direct, (options.url, lambda: nullcontext(Target(options.url, options.pid, key=options.key)))]
    served = [(GATEWAY, partial(own, "generate")), (RAW, partial(own, RAW))]
    return [*direct, *served, *((one.name, partial(peer, one)) for one in PEERS)]


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Of the rows that were measured: R1 over all concurrencies of a trace, R2 for each."""
    found = []
    reference = {(row.shape, row.concurrency): row.outcome.cpu_us for row in rows if row.router == REFERENCE}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.router != GATEWAY:
            continue
        one, name = row.outcome, f"R2 {row.shape} over HTTP, {row.concurrency} at once"
        found.append(Goal(f"{name}: hit rate / oracle", one.over_oracle, GOAL_HIT, at_least=True))
        found.append(Goal(f"{name}: max/mean requests", one.spread, GOAL_SPREAD))
        beside = reference.get((row.shape, row.concurrency))
        if beside and one.cpu_us:
            ratios.setdefault(row.shape, []).append(one.cpu_us / beside)
    return found + [
        Goal(f"R1 {shape}: CPU of the gateway / {REFERENCE} (median)", median(each), GOAL_CPU)
        for shape, each in ratios.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
