"""Goals R1, R2 and R3 of routing in one run, side by side with sglang-router 0.3.2 and smg 1.13.0.

    python tools/bench_router.py               # all of it; ends with 1 where a goal was missed
    python tools/bench_router.py --speed       # decisions per second of CPU time alone
    python tools/bench_router.py --routing     # hit rate and spread alone, in process
    python tools/bench_router.py --http        # the gateway and its peers alone (tools/bench_router_http.py has more)
    python tools/bench_router.py --makespan    # the simulated makespans alone (tools/simulate_rollout.py has more)

Traces: slimerl/simulation/rollout_scenarios.py, with so many conversations under way at once. Hit: cached prompt
tokens, over those of an oracle (one engine with an endless cache). Spread: requests of the busiest engine over the
mean. CPU times are the operating system's, and ratios those of one run: other load on the machine slows both sides,
if not quite alike.
"""

import argparse
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median
from time import monotonic, process_time

import bench_router_http
import simulate_rollout
from bench_goals import Goal, judged

from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.router import LeastLoaded, Query, Reservation, Router
from slimerl.samples.messages import EngineInfo
from slimerl.simulation.rollout_compare import Plan, kv_aware, least_loaded, makespan, round_robin, whole_groups
from slimerl.simulation.rollout_routers import RoundRobin
from slimerl.simulation.rollout_scenarios import CONCURRENCIES, DENSE, DESIGN, ROUTING_SHAPES
from slimerl.simulation.rollout_trace import Shape, draw_trace

ENGINES_TIMED = 64
IN_FLIGHT = 64 * 32
CAPACITY = 1 << 30
ROUTING_ENGINES = 8
KV_AWARE = "KV-aware"
KEYED, IDS = "keyed", "4,096 ids"
"""Kinds of workloads."""
GOAL_KEYED_PER_S, GOAL_IDS_PER_S = 50_000.0, 8_000.0
GOAL_KEYED_US, GOAL_IDS_US = 60.0, 150.0
OVER_HTTP = ("skewed", "multi-turn", "shared system prompt", "long context")
"""Traces beside the design trace, at one concurrency."""
HTTP_CONCURRENCY = 32
HTTP_ROWS = (bench_router_http.GATEWAY, "cache_aware")

ROUTERS: dict[str, Callable[[], Router]] = {
    "round robin": lambda: RoundRobin(CAPACITY),
    "least loaded": lambda: LeastLoaded(CAPACITY),
    KV_AWARE: lambda: KvRouter(CAPACITY, clock=monotonic),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in ("speed", "routing", "http", "makespan"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decisions", type=int, default=20_000)
    options = parser.parse_args()
    every = not (options.speed or options.routing or options.http or options.makespan)
    goals: list[Goal] = []
    if every or options.speed:
        goals += compare_speeds(options.decisions, options.seed)
    if every or options.routing:
        goals += compare_routing(options.seed)
    if every or options.http:
        goals += compare_over_http()
    if every or options.makespan:
        goals += simulate_rollout.run(simulate_rollout.read_options(["r3"]))
    return judged(goals)


# --- speed


def compare_speeds(decisions: int, seed: int) -> list[Goal]:
    """A decision: route, reserve, and the end of an earlier request."""
    rng = random.Random(seed)
    print(f"{ENGINES_TIMED} engines, {IN_FLIGHT} requests in flight; decisions per second of CPU time, median of 3")
    workloads = {
        f"{KEYED}: new sessions in groups of 8": keyed_new(decisions),
        f"{KEYED}: turns of 4,000 sessions": keyed_turns(decisions),
        f"{IDS}, 90 % shared, new sessions": with_ids(decisions // 4, rng),
        f"{IDS}, next turns of 1,000 sessions": growing_turns(decisions // 4, rng),
    }
    print(f"{'':<44}" + "".join(f"{name:>16}" for name in ROUTERS))
    goals = []
    for title, queries in workloads.items():
        speeds = {name: median(speed(make(), queries) for _ in range(3)) for name, make in ROUTERS.items()}
        print(f"{title:<44}" + "".join(f"{value:>14,.0f}/s" for value in speeds.values()), flush=True)
        keyed, per_s = title.startswith(KEYED), speeds[KV_AWARE]
        least, most_us = (GOAL_KEYED_PER_S, GOAL_KEYED_US) if keyed else (GOAL_IDS_PER_S, GOAL_IDS_US)
        goals.append(Goal(f"R1 {title}: decisions per second", per_s, least, at_least=True))
        goals.append(Goal(f"R1 {title}: added us per request", 1e6 / per_s, most_us))
    return goals


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

PLANS = (
    Plan("round robin", round_robin),
    Plan("least loaded", least_loaded),
    Plan("whole groups", whole_groups),
    Plan(KV_AWARE, kv_aware),
)


def compare_routing(seed: int) -> list[Goal]:
    """Every trace and concurrency, over processes."""
    print(f"\n{ROUTING_ENGINES} engines; hit rate over the oracle's, and max/mean requests, at each concurrency")
    places = [(shape, plan, concurrency) for shape in ROUTING_SHAPES for plan in PLANS for concurrency in CONCURRENCIES]
    goals: list[Goal] = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(partial(_routed, seed), places)
        cells: list[str] = []
        for (shape, plan, concurrency), (hit, spread) in zip(places, results, strict=True):
            if plan is PLANS[0] and not cells:
                print(f"\n{shape.name}\n{'':<16}" + "".join(f"{each:>22}" for each in CONCURRENCIES))
            cells.append(f"{hit:.4f}  {spread:.3f}")
            if len(cells) == len(CONCURRENCIES):
                print(f"{plan.name:<16}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
                cells.clear()
            if plan.name == KV_AWARE:
                name = f"R2 {shape.name} in process, {concurrency} at once"
                goals.append(Goal(f"{name}: hit rate / oracle", hit, bench_router_http.GOAL_HIT, at_least=True))
                goals.append(Goal(f"{name}: max/mean requests", spread, bench_router_http.GOAL_SPREAD))
    return goals


def _routed(seed: int, place: tuple[Shape, Plan, int]) -> tuple[float, float]:
    """Hit rate over the oracle's, and spread."""
    shape, plan, concurrency = place
    plan = replace(plan, in_flight=concurrency / ROUTING_ENGINES / DENSE.slots)
    result = makespan(plan, draw_trace(shape, seed), DENSE, ROUTING_ENGINES)
    return result.hit_over_oracle, result.tally.spread


# --- behind HTTP


def compare_over_http() -> list[Goal]:
    """The design trace at every concurrency, the others at one."""
    options = bench_router_http.read_options([])
    rows = bench_router_http.compare(options, DESIGN, CONCURRENCIES, HTTP_ROWS)
    for shape in ROUTING_SHAPES:
        if shape.name in OVER_HTTP:
            rows += bench_router_http.compare(options, shape, (HTTP_CONCURRENCY,), HTTP_ROWS)
    return bench_router_http.goals(rows)


if __name__ == "__main__":
    sys.exit(main())
