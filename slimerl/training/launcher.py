"""A node's part of the trainer role: `python -m slimerl.training.launcher SPEC [KEY=VALUE]…` becomes its launcher.

Flows in: the spec; where this node stands among the trainer's, from the environment: MASTER_ADDR and MASTER_PORT (the
first node), NODE_RANK. Flows out: a process that starts, and ends with, the node's ranks.

It is torchrun, or where nvidia-resiliency-ext is installed that package's launcher, whose monitors kill a rank that
hangs (`resilience/rank_monitor.py`). A conductor watches the ranks that it starts by itself, with the same deadlines,
and uses torchrun.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slimerl.resilience.failure_kinds import UNUSABLE_INPUT
from slimerl.resilience.rank_monitor import is_installed, monitor_options
from slimerl.spec import RunSpec, SpecError, load_spec

PROGRAM = "slimerl.training"


@dataclass(frozen=True)
class Place:
    """Of a node among those of the trainer. `address`, `port`: of the first; `number`: from 0."""

    address: str = "127.0.0.1"
    port: int = 29500
    number: int = 0


def launcher_command(spec: RunSpec, place: Place, arguments: Sequence[str], monitored: bool) -> list[str]:
    """Args: `arguments`: of each rank; `monitored`: is nvidia-resiliency-ext there?"""
    launcher = _monitoring(spec, place) if monitored else _torchrun(place)
    sizes = ["--nnodes", str(spec.trainer_nodes), "--nproc-per-node", str(spec.ranks_per_node)]
    return [sys.executable, "-m", *launcher, *sizes, "--max-restarts", "0", "-m", PROGRAM, *arguments]


def _torchrun(place: Place) -> list[str]:
    first = ["--master-addr", place.address, "--master-port", str(place.port)]
    return ["torch.distributed.run", "--node-rank", str(place.number), *first]


def _monitoring(spec: RunSpec, place: Place) -> list[str]:
    """Its nodes meet in a rendezvous, which numbers them in the order of their names: the first is called by its
    address, where all ranks will meet, and the others by names that come after any address, in their own order."""
    wait_s, end_s = math.ceil(spec.deadlines.start_s), str(math.ceil(spec.deadlines.shutdown_s))
    is_first = place.number == 0
    return [
        "slimerl.resilience.rank_monitor",
        *("--rdzv-id", "trainer", "--rdzv-endpoint", f"{place.address}:{place.port}"),
        *("--rdzv-conf", f"is_host={is_first:d},join_timeout={wait_s},read_timeout={wait_s}"),
        *("--local-addr", place.address if is_first else f"~{place.number:06d}"),
        *("--term-timeout", end_s, "--workers-stop-timeout", end_s),
        *monitor_options(spec.deadlines.alive_s),
    ]


def place_of(environment: Mapping[str, str], nodes: int = 1) -> Place:
    """What is missing or empty there is as on the only node. Raises SpecError: it is none of `nodes`."""
    port = _whole_number(environment, "MASTER_PORT", Place.port)
    number = _whole_number(environment, "NODE_RANK", Place.number)
    if number >= nodes:
        raise SpecError(f"NODE_RANK = {number}, and the trainer has {nodes} node{'s'[: nodes > 1]}, from 0 on")
    return Place(environment.get("MASTER_ADDR") or Place.address, port, number)


def _whole_number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not (text.isascii() and text.isdecimal()):
        raise SpecError(f"{name} = '{text}' is no whole number")
    return int(text)


def main(arguments: list[str]) -> int:
    """Returns only where the spec, or the place in the environment, cannot be used."""
    try:
        spec = load_spec(Path(arguments[0]), arguments[1:])
        place = place_of(os.environ, spec.trainer_nodes)
    except SpecError as error:
        print(error, file=sys.stderr)
        return UNUSABLE_INPUT
    command = launcher_command(spec, place, arguments, is_installed())
    return os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
