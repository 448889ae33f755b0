"""Answers kept for drafts, in the run directory: one file per checkpoint, drafts/step-N.

Flows in: what `Drafts.answers` gives, at a checkpoint. Flows out: the same, in the process that goes on after step N.
They do not travel with the rollout's state: an epoch's answers may be gigabytes, and a run without them is right, only
slower. Invariants: a file has its name once all of it is on the disk; what its digest does not prove is not read.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from slimerl.rollout.speculation.drafts import Answer
from slimerl.samples.messages import unpack_array

logger = logging.getLogger(__name__)

DIRECTORY = "drafts"
_DIGEST_BYTES = 8


class _SavedAnswer(msgspec.Struct, frozen=True):
    group: str
    session: str
    start: int
    context: int
    tokens: bytes
    logprobs: bytes
    version: int
    stopped: bool


class DraftsFile:
    """`keep`: files of so many checkpoints stay."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._directory = run_dir / DIRECTORY
        self._keep = keep

    def write(self, step: int, answers: Sequence[Answer]) -> None:
        """What cannot be written is warned of: a checkpoint is whole without it."""
        body = msgspec.msgpack.encode([_saved(answer) for answer in answers])
        path = self._directory / f"step-{step}"
        part = path.with_suffix(".part")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            part.write_bytes(xxhash.xxh64_digest(body) + body)
            part.replace(path)
            earlier = [each for each in self._steps() if each <= step]
            # later ones are of a time that the run went back from
            for other in set(self._steps()) - set(earlier[-self._keep :]):
                (self._directory / f"step-{other}").unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s: answers for drafts are not kept: %s; free disk space", path, error)

    def read(self, step: int) -> list[Answer]:
        """Of the checkpoint of `step`; none, with a warning, where there is no whole file."""
        path = self._directory / f"step-{step}"
        try:
            content = path.read_bytes()
            digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if digest != xxhash.xxh64_digest(body):
                raise ValueError("its digest is that of other bytes")
            return [_restored(saved) for saved in msgspec.msgpack.decode(body, type=list[_SavedAnswer])]
        except (OSError, ValueError) as error:
            logger.warning("%s: going on without drafts from earlier steps: %s", path, error)
            return []

    def _steps(self) -> list[int]:
        names = [path.name.removeprefix("step-") for path in self._directory.glob("step-*")]
        return sorted(int(name) for name in names if name.isdecimal())


def _saved(answer: Answer) -> _SavedAnswer:
    return _SavedAnswer(
        *(answer.group, answer.session, answer.start, answer.context),
        *(answer.tokens.astype("<i4").tobytes(), answer.logprobs.astype("<f4").tobytes()),
        *(answer.version, answer.stopped),
    )


def _restored(saved: _SavedAnswer) -> Answer:
    tokens = np.array(unpack_array(saved.tokens, "int32"))
    logprobs = np.array(unpack_array(saved.logprobs, "float32"))
    return Answer(
        saved.group, saved.session, saved.start, saved.context, tokens, logprobs, saved.version, saved.stopped
    )
