"""What each role takes of the machine: memory, file descriptors, threads, of the process and its descendants.

Flows in: /proc, and CUDA's allocator where this process uses it. Flows out: RUN_DIR/resources/ROLE.json, replaced as a
whole; the trainer's first rank collects them into the metrics of its step:
    memory/KIND_rss_gib, memory/KIND_peak_gib, memory/KIND_heap_gib, process/KIND_fds, process/KIND_threads,
    memory/KIND_cuda_…_gib
KIND is the role without its number, the figure the largest of its processes. The heap is that of the role's own
process, not of what it has started (an engine's role holds little). Memory that two processes share is counted in each.
A file is better than a message here: it needs no connection from the engines, and the run directory is shared.
"""

import asyncio
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from slimerl.telemetry import trace

logger = logging.getLogger(__name__)

RESOURCES_DIR = "resources"

PERIOD_S = 1.0
"""Of roles that have no steps of their own; looking costs some milliseconds."""

GIB = 2**30
_KIB_PER_GIB = 2**20


class ResourceMeter:
    """Publishes what this process and its descendants use. `role`: like `trainer-0`."""

    def __init__(self, run_dir: Path, role: str) -> None:
        self._path = run_dir / RESOURCES_DIR / f"{role}.json"

    def publish(self) -> None:
        """Look and write. A disk that is full is worth a warning, not the role."""
        figures = usage(os.getpid()) | heap_usage() | cuda_usage()
        trace.counter("memory GiB", {name: value for name, value in figures.items() if name.endswith("_gib")})
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(figures), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            logger.warning("%s cannot be written; the metrics keep its last figures: %s", self._path, error)

    async def watch(self) -> None:
        """Publish until cancelled."""
        while True:
            await asyncio.to_thread(self.publish)
            await asyncio.sleep(PERIOD_S)


def collect(run_dir: Path) -> dict[str, float]:
    """The figures of all roles; of several roles of a kind, the largest."""
    largest: dict[str, float] = {}
    for file in sorted((run_dir / RESOURCES_DIR).glob("*.json")):
        # behind its number: which of the machines of an engine
        kind = re.sub(r"-\d+(@\d+)?$", "", file.stem)
        for name, value in json.loads(file.read_text(encoding="utf-8")).items():
            group = "memory" if name.endswith("_gib") else "process"
            figure = f"{group}/{kind}_{name}"
            largest[figure] = max(value, largest.get(figure, 0.0))
    return largest


def usage(pid: int) -> dict[str, float]:
    """Of a process and its descendants: `rss_gib`, `peak_gib` (sum of each one's own peak), `fds`, `threads`."""
    totals = dict.fromkeys(("rss_gib", "peak_gib", "fds", "threads"), 0.0)
    for each in _tree(pid):
        try:
            status = Path(f"/proc/{each}/status").read_text(encoding="utf-8")
            descriptors = len(os.listdir(f"/proc/{each}/fd"))
        except OSError:
            continue  # it has just ended, or belongs to another user
        totals["rss_gib"] += _field(status, "VmRSS") / _KIB_PER_GIB
        totals["peak_gib"] += _field(status, "VmHWM") / _KIB_PER_GIB
        totals["threads"] += _field(status, "Threads")
        totals["fds"] += descriptors
    return totals


def heap_usage() -> dict[str, float]:
    """Of this process: `heap_gib`, what its allocator has given out and not got back. The resident pages are more: it
    keeps freed ones for later. Nothing where the C library does not tell."""
    if not hasattr(psutil, "heap_info"):
        return {}
    heap = psutil.heap_info()
    return {"heap_gib": (heap.heap_used + heap.mmap_used) / GIB}


def cuda_usage() -> dict[str, float]:
    """Of this process's allocator; nothing where it does not use CUDA."""
    torch = sys.modules.get("torch")  # a role that has not imported it uses none
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {
        "cuda_allocated_gib": torch.cuda.memory_allocated() / GIB,
        "cuda_reserved_gib": torch.cuda.memory_reserved() / GIB,
        "cuda_peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return


def _field(status: str, name: str) -> float:
    """A number of /proc/PID/status; 0 where it has none (a process that is ending has no memory any more)."""
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    return float(found[1]) if found else 0.0
