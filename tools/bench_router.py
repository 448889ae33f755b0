"""Routers side by side, in process: decisions per second, hit rate against the oracle, spread of requests.

    python tools/bench_router.py                 # all of it, about two minutes
    python tools/bench_router.py --speed         # decisions per second of CPU time alone
    python tools/bench_router.py --routing       # hit rate and spread alone

Hit rates and spreads come from the traces of slimerl/simulation/rollout_scenarios.py on simulated engines, with so many
conversations under way at once. Hit: cached prompt tokens, over those of an oracle (one engine with an endless cache).
Spread: requests of the busiest engine over the mean.
"""

import argparse
import random
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from time import monotonic, process_time

from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.router import LeastLoaded, Query, Reservation, Router
from slimerl.samples.messages import EngineInfo
from slimerl.simulation.rollout_compare import Plan, kv_aware, least_loaded, makespan, round_robin, whole_groups
from slimerl.simulation.rollout_routers import RoundRobin
from slimerl.simulation.rollout_scenarios import CONCURRENCIES, DENSE, ROUTING_SHAPES
from slimerl.simulation.rollout_trace import draw_trace

ENGINES_TIMED = 64
IN_FLIGHT = 64 * 32
CAPACITY = 1 << 30
ROUTING_ENGINES = 8

ROUTERS: dict[str, Callable[[], Router]] = {
    "round robin": lambda: RoundRobin(CAPACITY),
    "least loaded": lambda: LeastLoaded(CAPACITY),
    "KV-aware": lambda: KvRouter(CAPACITY, clock=monotonic),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--routing", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decisions", type=int, default=20_000)
    options = parser.parse_args()
    if options.speed or not options.routing:
        print_speeds(options.decisions, options.seed)
    if options.routing or not options.speed:
        print_routing(options.seed)


# --- speed


def print_speeds(decisions: int, seed: int) -> None:
    """A decision: route, reserve, and the end of an earlier request."""
    rng = random.Random(seed)
    print(f"{ENGINES_TIMED} engines, {IN_FLIGHT} requests in flight; decisions per second of CPU time, median of 3")
    workloads = {
        "keyed: new sessions in groups of 8": keyed_new(decisions),
        "keyed: turns of 4,000 sessions": keyed_turns(decisions),
        "4,096 ids, 90 % shared, new sessions": with_ids(decisions // 4, rng),
        "4,096 ids, next turns of 1,000 sessions": growing_turns(decisions // 4, rng),
    }
    print(f"{'':<44}" + "".join(f"{name:>16}" for name in ROUTERS))
    for title, queries in workloads.items():
        speeds = [median(speed(make(), queries) for _ in range(3)) for make in ROUTERS.values()]
        print(f"{title:<44}" + "".join(f"{value:>14,.0f}/s" for value in speeds), flush=True)


def speed(router: Router, queries: Sequence[Query]) -> float:
    """Decisions per second of CPU time."""
    names = [f"engine-{number}" for number in range(ENGINES_TIMED)]
    for name in names:
        router.join(EngineInfo(name, f"http://{name}", "", 1))
    router.release(0, names, {})
    live: deque[Reservation] = deque()
    start = process_time()
    for query in queries:
        engine_id = router.route(query)
        if engine_id is None:
            raise RuntimeError(
                "no engine has room: the bench's capacity is unlimited, so this is a fault of the router"
            )
        live.append(router.reserve(engine_id, query))
        if len(live) > IN_FLIGHT:
            router.end(live.popleft())
    return len(queries) / (process_time() - start)


def keyed_new(count: int) -> list[Query]:
    return [Query(f"s{number}", f"g{number // 8}", None, 256) for number in range(count)]


def keyed_turns(count: int) -> list[Query]:
    return [Query(f"s{number % 4000}", f"g{number % 4000 // 8}", None, 256) for number in range(count)]


def with_ids(count: int, rng: random.Random) -> list[Query]:
    """New sessions: one of 64 starts of 3,686 ids, and 410 of their own."""
    starts = [_ids(3686, rng) for _ in range(64)]
    return [Query(f"s{number}", "", rng.choice(starts) + _ids(410, rng), 256) for number in range(count)]


def growing_turns(count: int, rng: random.Random) -> list[Query]:
    """Turns of sessions whose history is 3,686 ids long; each adds some."""
    history = {f"s{number}": _ids(3686, rng) for number in range(1000)}
    queries = []
    for number in range(count):
        session = f"s{number % 1000}"
        history[session] += _ids(82, rng)
        queries.append(Query(session, f"g{number % 1000 // 8}", history[session], 256))
    return queries


def _ids(count: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choices(range(150_000), k=count))


# --- routing


def print_routing(seed: int) -> None:
    plans = (
        ("round robin", round_robin),
        ("least loaded", least_loaded),
        ("whole groups", whole_groups),
        ("KV-aware", kv_aware),
    )
    print(f"\n{ROUTING_ENGINES} engines; hit rate over the oracle's, and max/mean requests, at each concurrency")
    for shape in ROUTING_SHAPES:
        trace = draw_trace(shape, seed)
        print(f"\n{shape.name}: {trace.requests} requests, oracle {trace.oracle().hit_rate:.4f}")
        print(f"{'':<16}" + "".join(f"{concurrency:>22}" for concurrency in CONCURRENCIES))
        for name, maker in plans:
            cells = []
            for concurrency in CONCURRENCIES:
                plan = Plan(name, maker, in_flight=concurrency / ROUTING_ENGINES / DENSE.slots)
                result = makespan(plan, trace, DENSE, ROUTING_ENGINES)
                cells.append(f"{result.hit_over_oracle:.4f}  {result.tally.spread:.3f}")
            print(f"{name:<16}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
