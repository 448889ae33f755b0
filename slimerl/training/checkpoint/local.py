"""Checkpoints on the nodes' own disks: names, the note of them in the run directory, choice, removal. Plain files.

    LOCAL_DIR/NAME-PLACE.START/rank-3/step-25/   written and verified as any checkpoint (`directory.py`)
        rank-3.pt                                what rank 3 has to know to go on
        rank-11.pt                               a copy of what rank 11 has, which runs on another node
    RUN_DIR/checkpoints/local.json               the note: whose parts count, and the newest step of them

PLACE is of the run directory, START is drawn where a run begins, also anew, or goes on from the shared storage: no run
takes or removes another's parts, and those of ranks that a node has no more go.
Invariant: the parts of a step are used together or not at all, and only those of one save: a run that did a step twice
may have left parts of both times.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from slimerl.training.checkpoint import directory
from slimerl.training.checkpoint.directory import Damaged

NOTE = "local.json"
KEPT = 1
"""A step of which a part is lost has the shared checkpoint behind it; memory below /dev/shm is dear."""
RUN, SAVE, FORMAT = "run of the local checkpoint", "save of the local checkpoint", "format of the local checkpoint"
"""In `Manifest.identity` of a part."""
_PART = re.compile(r"rank-(0|[1-9][0-9]*)\.pt")
_LONGEST = 100
"""Characters of the run's name; a file system takes 255."""


class Place(msgspec.Struct, frozen=True):
    """Of a run directory."""

    path: str
    inode: int

    @staticmethod
    def of(run_dir: Path) -> "Place":
        """Raises OSError."""
        return Place(str(run_dir.resolve()), run_dir.stat().st_ino)

    def is_of(self, other: "Place") -> bool:
        """One that was moved, or is mounted anew, keeps one of both; a copy has neither."""
        return self.path == other.path or self.inode == other.inode


class Note(msgspec.Struct, frozen=True):
    """`run`: the directory's name in `local_dir`; `place`: of the run directory; `step`: the newest that was whole; 0:
    none yet."""

    run: str
    local_dir: str
    place: Place
    step: int = 0


def read_note(root: Path) -> Note | None:
    """Of a run's directory of checkpoints; None: there is none, or it is not what was written. Raises OSError."""
    try:
        return msgspec.json.decode((root / NOTE).read_bytes(), type=Note)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def unusable_names(root: Path) -> list[str]:
    """Those of `directory.unusable_names`, and the note where it is not what was written. Raises OSError."""
    spoilt = [NOTE] if (root / NOTE).exists() and read_note(root) is None else []
    return directory.unusable_names(root) + spoilt


def write_note(root: Path, note: Note) -> None:
    """Replace it. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    part = root / f"{NOTE}.part"
    directory.write_flushed(part, msgspec.json.encode(note))
    part.replace(root / NOTE)


def forget(root: Path) -> None:
    """The run goes on without local ones: those on the nodes become older than what it does. Raises OSError."""
    # no directory has no note
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (root / NOTE).unlink()


def newest_checkpoint(root: Path) -> int | None:
    """Step of the newest one of a run, of either kind, as its directory of checkpoints tells; None: it has none."""
    note = read_note(root)
    noted = [note.step] if note is not None and note.step else []
    return max([*directory.complete_steps(root)[:1], *noted], default=None)


def new_run(name: str, place: Place) -> str:
    """The name of the directory of a run that begins. Args: `place`: of its run directory."""
    digest = xxhash.xxh3_64_hexdigest(f"{place.inode} {place.path}".encode())
    return f"{name[:_LONGEST]}-{digest}.{os.urandom(8).hex()}"


def rank_root(local_dir: Path, run: str, rank: int) -> Path:
    """Where the process of a rank writes."""
    return local_dir / run / f"rank-{rank}"


def part_name(rank: int) -> str:
    return f"rank-{rank}.pt"


@dataclass(frozen=True)
class Offer:
    """What the disk of one rank says that it has of a step. `save`: which time the step was saved; `parts`: whose."""

    step: int
    save: str
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Offers:
    """Of one rank. `damaged`, `unfit`: steps that cannot be used, with the reason; the latter are of another layout or
    version of the libraries, and may be whole."""

    found: tuple[Offer, ...] = ()
    damaged: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()


def offered(root: Path, run: str, layout: Mapping[str, Any], form: str) -> Offers:
    """What lies in the directory of one rank; nothing is digested yet."""
    found, damaged, unfit = [], [], []
    try:
        steps = directory.complete_steps(root)
    except OSError as error:
        return Offers(damaged=(f"{root}: {error.strerror}",))
    for step in steps:
        where = directory.complete_path(root, step)
        try:
            manifest = directory.read_manifest(where)
        except Damaged as error:
            damaged.append(f"{where}: {error}")
            continue
        if manifest.step != step or manifest.identity.get(RUN) != run:
            damaged.append(f"{where}: its manifest is of another run or step")
        elif manifest.layout != layout:
            unfit.append(f"{where}: it is of another training.parallel")
        elif manifest.identity.get(FORMAT) != form:
            unfit.append(f"{where}: it was written by {manifest.identity.get(FORMAT)}, this is {form}")
        else:
            parts = sorted(int(match[1]) for name in manifest.files if (match := _PART.fullmatch(name)))
            found.append(Offer(step, str(manifest.identity.get(SAVE)), tuple(parts)))
    return Offers(tuple(found), tuple(damaged), tuple(unfit))


def saves(offers: Sequence[Offers]) -> list[tuple[int, str]]:
    """(step, save), newest step first, that any of all ranks offers."""
    return sorted({(each.step, each.save) for of_rank in offers for each in of_rank.found}, reverse=True)


def holders(offers: Sequence[Offers], step: int, save: str) -> dict[int, list[int]]:
    """Each rank → those that offer its part of a save."""
    found: dict[int, list[int]] = {owner: [] for owner in range(len(offers))}
    for rank, of_rank in enumerate(offers):
        for each in of_rank.found:
            for owner in each.parts if (each.step, each.save) == (step, save) else ():
                found[owner].append(rank)
    return found


def in_order(shared: Sequence[int], near: Sequence[tuple[int, str]]) -> list[tuple[int, str | None]]:
    """Checkpoints of both tiers, newest first, as (step, save of a local one); of a step the local one first, which is
    faster to read."""
    both = [(step, 0, None) for step in shared] + [(step, 1, save) for step, save in near]
    return [(step, save) for step, _, save in sorted(both, key=lambda each: each[:2], reverse=True)]


def remove_newer(root: Path, step: int) -> None:
    """What came after `step`. Raises OSError."""
    for each in directory.complete_steps(root):
        if each > step:
            shutil.rmtree(directory.complete_path(root, each))


def remove_strangers(local_dir: Path, run: str, before: str = "") -> None:
    """What earlier starts of the run directory left, which nobody will ask for, as far as that can be done now.

    Args: `before`: the run of the start before, of another name than `run` where the run directory was moved since.
    """
    starts = {each.rpartition(".")[0] for each in (run, before) if each}
    with contextlib.suppress(OSError):
        for each in local_dir.iterdir():
            if each.name != run and each.name.rpartition(".")[0] in starts:
                shutil.rmtree(each, ignore_errors=True)


def remove_all(root: Path) -> None:
    """Of one rank, once nobody will ask for it."""
    shutil.rmtree(root, ignore_errors=True)
    with contextlib.suppress(OSError):
        # goes with the last rank of the node
        root.parent.rmdir()
