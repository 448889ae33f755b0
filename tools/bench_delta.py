"""Measures the deltas of `sync.transport: delta` on this machine: how small, how fast.

    python tools/bench_delta.py [--mib 64]

Goals (P6), of bf16 weights of which a hundredth moved to a neighbouring number: at least 100 times smaller than the
weights, and at least 1 GB/s of weights encoded by a core.

Each case is a matrix of random weights and the same after a change. `encode` finds the changes, encodes them and brings
the sender's copy up to date (`PatchWriter`, `SentState`), for an engine of `ranks` ranks; `decode` checks the patches
and changes the engine's parameters. For comparison: both states xor-ed, compressed by zstd at level 1. Times are
seconds of processor time of one thread, the best of a few runs. Exit code 1: a goal was missed.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer
import zstandard
from rich.console import Console
from rich.table import Table

from slimerl.engine.inside.delta import units
from slimerl.engine.inside.patch import apply_part, unpack_patch
from slimerl.resharding.boxes import Box
from slimerl.resharding.patches import PatchWriter
from slimerl.resharding.sent_state import SentState
from slimerl.resharding.tensors import Placement

T = TypeVar("T")
MIB = 1 << 20
REPEATS = 3
COLUMNS = 4096
NAME = "weight"
SMALLER, ENCODE_GB_S = 100.0, 1.0
"""The goals, of the first case."""

console = Console(width=150)


@dataclass(frozen=True)
class Case:
    what: str
    dtype: torch.dtype
    change: Callable[[torch.Tensor, np.random.Generator], torch.Tensor]
    ranks: int = 1
    cut: int = 0
    """The dimension that ranks divide."""


def neighbours(share: float) -> Callable[[torch.Tensor, np.random.Generator], torch.Tensor]:
    """That share of the elements moves to the number above or below."""

    def change(old: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
        new = old.clone()
        flat = units(new)
        moved = np.flatnonzero(random.random(len(flat), np.float32) < share)
        by = random.choice(np.array([1, -1], f"i{flat.itemsize}"), len(moved))
        by[(flat[moved] << 1) == 0] = 1  # what lies below a zero's bits is no number
        flat[moved] += by.view(flat.dtype)
        return new

    return change


def adam_step(rate: float) -> Callable[[torch.Tensor, np.random.Generator], torch.Tensor]:
    """A step of Adam's size, of fp32 masters that lie anywhere within the rounding of the old weights."""

    def change(old: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
        master = old.float()
        spacing = torch.from_numpy(np.spacing(np.abs(units(master).view(np.float32)))).view(old.shape) * 2**16
        master += spacing * torch.from_numpy(random.random(old.shape, np.float32) - 0.5)
        step = torch.from_numpy(random.standard_normal(old.shape, np.float32)).clamp_(-1, 1)
        return (master - rate * step).to(old.dtype)

    return change


CASES = [
    Case("bf16, 1 % moved by one", torch.bfloat16, neighbours(0.01)),
    Case("the same, 8 ranks by rows", torch.bfloat16, neighbours(0.01), ranks=8),
    Case("the same, 8 ranks by columns", torch.bfloat16, neighbours(0.01), ranks=8, cut=1),
    Case("bf16, 0.1 % moved by one", torch.bfloat16, neighbours(0.001)),
    Case("bf16, 10 % moved by one", torch.bfloat16, neighbours(0.1)),
    Case("bf16, a step of Adam, rate 1e-6", torch.bfloat16, adam_step(1e-6)),
    Case("bf16, a step of Adam, rate 1e-5", torch.bfloat16, adam_step(1e-5)),
    Case("fp8, 1 % moved by one", torch.float8_e4m3fn, neighbours(0.01)),
    Case("fp32, 1 % moved by one", torch.float32, neighbours(0.01)),
]


@dataclass(frozen=True)
class Figures:
    moved: float
    smaller: float
    encode_gb_s: float
    decode_gb_s: float
    xor_smaller: float
    xor_gb_s: float


def placements(shape: tuple[int, int], case: Case) -> Iterator[list[Placement]]:
    whole = Box.whole(shape)
    part = shape[case.cut] // case.ranks
    for rank in range(case.ranks):
        box = whole.range_in(case.cut, rank * part, (rank + 1) * part)
        yield [Placement(NAME, Box.whole(box.shape), NAME, box)]


def seconds(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def measure(case: Case, nbytes: int) -> Figures:
    """Raises AssertionError where the parameters are not bit for bit the new state."""
    random = np.random.default_rng(0)
    shape = (nbytes // case.dtype.itemsize // COLUMNS, COLUMNS)
    old = torch.from_numpy(random.standard_normal(shape, np.float32)).mul_(0.02).to(case.dtype)
    new = case.change(old, random)
    placed = list(placements(shape, case))
    best_encode = best_decode = np.inf
    for _ in range(REPEATS):
        state, live = SentState(), [{NAME: units_part(old, rank[0].box)} for rank in placed]
        state.take([(NAME, old)])
        writer = PatchWriter(placed, state)

        def encode(state: SentState = state, writer: PatchWriter = writer) -> list[bytearray]:
            state.begin()
            patches = writer.changing([NAME], state.take([(NAME, new)]))
            for patch in patches:
                hashlib.sha256(patch)
            return patches

        encode_s, patches = seconds(encode)

        def decode(live: list[dict[str, torch.Tensor]] = live, patches: list[bytearray] = patches) -> None:
            for parameters, patch in zip(live, patches, strict=True):
                hashlib.sha256(patch)
                for part, body in unpack_patch(patch):
                    apply_part(parameters, part, body)

        decode_s, _ = seconds(decode)
        best_encode, best_decode = min(best_encode, encode_s), min(best_decode, decode_s)
        for rank, parameters in zip(placed, live, strict=True):
            assert np.array_equal(units(parameters[NAME]), units(new[rank[0].box.slices]))
    size = old.nbytes
    xor_s, compressed = seconds(
        lambda: zstandard.ZstdCompressor(level=1).compress((units(old) ^ units(new)).view(np.uint8).data)
    )
    return Figures(
        moved=float((units(old) != units(new)).mean()),
        smaller=size / sum(map(len, patches)),
        encode_gb_s=size / best_encode / 1e9,
        decode_gb_s=size / best_decode / 1e9,
        xor_smaller=size / len(compressed),
        xor_gb_s=size / xor_s / 1e9,
    )


def units_part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A copy of a box."""
    return tensor[box.slices].clone(memory_format=torch.contiguous_format)


def main(mib: Annotated[int, typer.Option(help="Of weights in each case.")] = 64) -> None:
    first = show(mib)
    missed = first.smaller < SMALLER or first.encode_gb_s < ENCODE_GB_S
    console.print(
        f"p6 {'MISSED' if missed else 'met'}: {first.smaller:.0f} times smaller (goal {SMALLER:g}), "
        f"{first.encode_gb_s:.2f} GB/s a core (goal {ENCODE_GB_S:g})"
    )
    raise typer.Exit(int(missed))


def show(mib: int) -> Figures:
    """Print a table of all cases; returns the figures of the first, for which the goals are."""
    torch.set_num_threads(1)
    table = Table(title=f"deltas of {mib} MiB of weights", title_justify="left")
    for head in ("case", "moved", "times smaller", "encode GB/s", "decode GB/s", "xor + zstd-1: smaller", "GB/s"):
        table.add_column(head, justify="left" if head == "case" else "right")
    figures = [measure(case, mib * MIB) for case in CASES]
    for case, found in zip(CASES, figures, strict=True):
        table.add_row(
            case.what,
            f"{found.moved:.2%}",
            f"{found.smaller:.1f}",
            f"{found.encode_gb_s:.2f}",
            f"{found.decode_gb_s:.2f}",
            f"{found.xor_smaller:.1f}",
            f"{found.xor_gb_s:.2f}",
        )
    console.print(table)
    return figures[0]


if __name__ == "__main__":
    typer.run(main)
