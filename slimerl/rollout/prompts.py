"""Prompts: checked rows, tokenised, in an order that a cursor alone can resume.

Flows in: JSONL rows (`slimerl.samples.rows`) and a way to encode text. Flows out: `Prompt`s, and from `PromptStream`
the prompt at any position of the endless sequence of shuffled epochs.
Invariants: a prompt that is too long is refused before the run starts; the order is a pure function of the seed, the
epoch and the ids (not of the rows' order in the file).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from slimerl.samples.rows import DataError, Row, not_utf8, raise_faults, scan_rows

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Texts of prompts → token ids of each, chat template included. All at once: tokenizers are fast in bulk alone."""


@dataclass(frozen=True, slots=True)
class Prompt:
    prompt_id: str
    tokens: tuple[int, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """A prompt as it comes up in one epoch; `group_id` is unique over the run."""

    group_id: str
    epoch: int
    prompt: Prompt


def read_rows(path: Path, target: str = "answer") -> list[Row]:
    """Read and check a JSONL file. Raises DataError: file and line of each fault, or why it cannot be read."""
    rows, faults = scan_file(path, target)
    raise_faults(faults)
    return rows


def scan_file(path: Path, target: str = "answer") -> tuple[list[Row], list[str]]:
    """As `read_rows`, but the good rows and the faults of the others, one line each."""
    try:
        with path.open(encoding="utf-8") as lines:
            return scan_rows(lines, str(path), target)
    except OSError as error:
        return [], [f"{path}: cannot read the data: {error.strerror}"]
    except UnicodeDecodeError:
        with path.open("rb") as raw:
            return [], [not_utf8(raw, str(path))]


def tokenize_rows(rows: Sequence[Row], encode: Encode, max_tokens: int, source: str) -> list[Prompt]:
    """Encode every prompt.

    Args:
        max_tokens: `data.max_prompt_tokens`.
        source: name of the file in errors.

    Raises:
        DataError: prompts longer than `max_tokens`, or that encode to nothing.
    """
    prompts, faults = scan_prompts(rows, encode, max_tokens, source)
    raise_faults(faults)
    return prompts


def scan_prompts(rows: Sequence[Row], encode: Encode, max_tokens: int, source: str) -> tuple[list[Prompt], list[str]]:
    """As `tokenize_rows`, but the good prompts and the faults of the others, one line each."""
    if not rows:
        return [], []
    prompts = []
    faults = []
    for row, ids in zip(rows, encode([row.prompt for row in rows]), strict=True):
        tokens = tuple(ids)
        if not tokens:
            faults.append(f"{source}:{row.line}: prompt of id {row.row_id!r} has no tokens")
        elif len(tokens) > max_tokens:
            faults.append(
                f"{source}:{row.line}: prompt of id {row.row_id!r} has {len(tokens)} tokens, more than "
                f"data.max_prompt_tokens = {max_tokens}; shorten it or raise the bound"
            )
        else:
            prompts.append(Prompt(row.row_id, tokens, row.target))
    return prompts, faults


@dataclass
class PromptStream:
    """Epoch after epoch of all prompts, each epoch in an order of its own. `cursor`: prompts drawn so far."""

    prompts: Sequence[Prompt]
    seed: int
    cursor: int = 0
    _epoch: int = field(default=-1, init=False)
    _order: list[int] = field(default_factory=list, init=False)

    def draw(self) -> Drawn:
        """The next prompt."""
        drawn = self.at(self.cursor)
        self.cursor += 1
        return drawn

    def again(self, group_id: str) -> Drawn:
        """A prompt that was drawn before. Raises DataError when it is not among the prompts."""
        epoch, _, prompt_id = group_id.partition("/")
        prompt = next((prompt for prompt in self.prompts if prompt.prompt_id == prompt_id), None)
        if prompt is None:
            raise DataError(f"prompt '{prompt_id}' was drawn before, but data.train_path has none of that id")
        return Drawn(group_id, int(epoch), prompt)

    def positions(self, group_ids: Iterable[str]) -> dict[str, int]:
        """Where groups come up in the sequence: the way back from `at`. Of prompts that do not exist there is none."""
        of_epoch: dict[int, set[str]] = {}
        for group_id in group_ids:
            of_epoch.setdefault(int(group_id.partition("/")[0]), set()).add(group_id)
        found: dict[str, int] = {}
        for epoch, wanted in of_epoch.items():
            first = epoch * len(self.prompts)
            for place in range(len(self.prompts)):
                if (name := self.at(first + place).group_id) in wanted:
                    found[name] = first + place
        return found

    def at(self, position: int) -> Drawn:
        """The prompt at a position of the sequence, counted over all epochs."""
        epoch, place = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            self._order = shuffled([prompt.prompt_id for prompt in self.prompts], self.seed, epoch)
            self._epoch = epoch
        prompt = self.prompts[self._order[place]]
        return Drawn(f"{epoch}/{prompt.prompt_id}", epoch, prompt)


def shuffled(ids: Sequence[str], seed: int, epoch: int) -> list[int]:
    """Places of `ids` in the order of a hash of (seed, epoch, id): the same on every machine and library version."""
    return sorted(range(len(ids)), key=lambda place: (_hash(f"{seed}/{epoch}/{ids[place]}"), place))


def sampling_seed(run_seed: int, sample_id: str, attempt: int) -> int:
    """Seed that is sent with a request, in 31 bits: a replayed run draws the same tokens, however it is batched.

    `attempt` counts how often the sample was drawn anew; a request that is repeated because an engine failed is the
    same attempt, so that the fault leaves no trace in the tokens.
    """
    return _hash(f"{run_seed}/{sample_id}/{attempt}") & 0x7FFF_FFFF


def _hash(text: str) -> int:
    return xxhash.xxh64_intdigest(text.encode())
