"""The rows of preference data, tokenised: `{"id", "prompt", "chosen", "rejected"}` of a JSONL file, and `"margin"`, by
how much a reward model is to score the chosen answer higher, where it is given.

Flows in: the file, the model's tokenizer. Flows out: pairs of samples. Invariants: as of supervised rows
(`sft_rows.py`), which each half of a pair is; the halves of a pair differ.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slimerl.samples.rows import DataError, raise_faults
from slimerl.spec.schema import DataSpec
from slimerl.training.sft_rows import read_samples
from slimerl.training.training_sample import TrainingSample

ANSWERS = ("chosen", "rejected")
LARGEST_MARGIN = 3.4028234663852886e38
"""What float32 holds, in which scores are compared."""


@dataclass(frozen=True)
class Pair:
    sample_id: str
    chosen: TrainingSample
    rejected: TrainingSample


def read_pairs(path: Path, tokenizer: Any, data: DataSpec, max_tokens: int) -> list[Pair]:
    """Read, check and tokenise a data file; arguments as `read_samples`.

    Raises:
        DataError: one line per fault: file, line, reason; or the chat template cannot frame a prompt.
    """
    halves: list[list[TrainingSample]] = []
    faults: list[str] = []
    for answer in ANSWERS:
        try:
            halves.append(read_samples(path, tokenizer, data, max_tokens, target=answer))
        except DataError as error:
            faults += str(error).splitlines()
    # what is wrong with a row as a whole is found twice
    raise_faults(list(dict.fromkeys(faults)))
    pairs = [_pair(*each) for each in zip(*halves, _margins(path), strict=True)]
    raise_faults([f"{path}: id '{each.sample_id}': chosen and rejected are the same" for each in pairs if _same(each)])
    return pairs


def _pair(chosen: TrainingSample, rejected: TrainingSample, margin: float) -> Pair:
    name = chosen.sample_id
    leading = replace(chosen, sample_id=f"{name} chosen", margin=margin)
    return Pair(name, leading, replace(rejected, sample_id=f"{name} rejected"))


def _margins(path: Path) -> list[float]:
    """Of a file whose rows are sound but for these; 0 where none is given. Raises DataError."""
    found: list[float] = []
    faults: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        given = json.loads(line).get("margin", 0.0)
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= LARGEST_MARGIN:
            faults.append(f"{path}:{number}: 'margin' is {given!r:.40}; it is a number, 0 or more, that float32 holds")
        else:
            found.append(float(given))
    raise_faults(faults)
    return found


def _same(pair: Pair) -> bool:
    return pair.chosen.tokens.tobytes() == pair.rejected.tokens.tobytes()
