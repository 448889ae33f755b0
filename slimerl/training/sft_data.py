"""Supervised fine-tuning's source of samples: rows `{"id", "prompt", "response"}` of a JSONL file.

Flows in: the file, the model's tokenizer. Flows out: this rank's micro-batches. Invariants: a response ends with the
end-of-sequence token, and only its tokens count; the order is a pure function of the seed, the epoch and the ids.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from slimerl.samples.rows import DataError, Row, parse_rows, raise_faults
from slimerl.spec import RunSpec
from slimerl.spec.schema import DataSpec
from slimerl.training.batches import MicroBatch
from slimerl.training.batching import Batching
from slimerl.training.clock import StepClock
from slimerl.training.packing import SampleShape
from slimerl.training.parallel import Grid, sum_and_max
from slimerl.training.source import StepInput
from slimerl.training.step import PolicyTrainer
from slimerl.training.training_sample import TrainingSample


def read_samples(path: Path, tokenizer: Any, data: DataSpec, max_tokens: int) -> list[TrainingSample]:
    """Read, check and tokenise a data file.

    Args:
        tokenizer: of transformers.
        max_tokens: the model's longest sequence.

    Raises:
        DataError: one line per fault: file, line, reason.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            rows = parse_rows(lines, str(path), target="response")
    except OSError as error:
        raise DataError(f"{path}: cannot read the data: {error.strerror}") from None
    framed = [_framed(row.prompt, tokenizer, data) for row in rows]
    # a chat template has written the special tokens already
    prompts = tokenizer(framed, add_special_tokens=not data.chat_template)
    responses = tokenizer([row.target for row in rows], add_special_tokens=False)
    samples, faults = [], []
    for row, prompt, response in zip(rows, prompts["input_ids"], responses["input_ids"], strict=True):
        tokens = [*prompt, *response, tokenizer.eos_token_id]
        where = f"{path}:{row.line}"
        if len(prompt) > data.max_prompt_tokens:
            bound = f"data.max_prompt_tokens = {data.max_prompt_tokens}"
            faults.append(f"{where}: the prompt has {len(prompt)} tokens, more than {bound}")
        elif len(tokens) > max_tokens:
            faults.append(f"{where}: the row has {len(tokens)} tokens, the model takes {max_tokens}")
        else:
            samples.append(_sample(row, tokens, len(prompt)))
    raise_faults(faults)
    return samples


class RowSource:
    """Epoch after epoch of all rows, each epoch in an order of its own; a step may span two epochs."""

    def __init__(
        self,
        spec: RunSpec,
        grid: Grid,
        batching: Batching,
        train: Sequence[TrainingSample],
        held_out: Sequence[TrainingSample] = (),
    ) -> None:
        self._spec, self._grid, self._batching, self._train = spec, grid, batching, train
        self._held_out = held_out[: spec.evaluation.max_prompts]
        self._epoch = -1
        self._places: list[int] = []

    def take(self, step: int, clock: StepClock) -> StepInput:
        with clock(step, "fetch"):
            size = self._spec.training.prompts_per_step
            chosen = [self._at(position) for position in range((step - 1) * size, step * size)]
            return StepInput(self._packed(chosen, self._spec.training.minibatches_per_step))

    def trained(self, step: int) -> None: ...

    def state(self) -> bytes:
        """Nothing: the rows of a step follow from its number."""
        return b""

    def restore(self, state: bytes) -> None: ...

    def evaluate(self, step: int, trainer: PolicyTrainer) -> dict[str, float]:
        """Mean negative log-likelihood per response token of the held-out rows, in nats."""
        [micro_batches] = self._packed(self._held_out, minibatches=1)
        found = torch.cat([torch.zeros(0, device=self._grid.device), *trainer.logprobs(micro_batches)]).double()
        sums = torch.stack([-found.sum(), found.new_tensor(len(found))])
        (total, count), _ = sum_and_max(sums, found.new_zeros(0), counts_here=self._grid.speaks_for_replica)
        return {"eval/loss": total / max(1.0, count)}

    def _at(self, position: int) -> TrainingSample:
        epoch, place = divmod(position, len(self._train))
        if epoch != self._epoch:
            keys = [f"{self._spec.seed}/{epoch}/{sample.sample_id}".encode() for sample in self._train]
            self._places = sorted(range(len(keys)), key=lambda each: xxhash.xxh64_intdigest(keys[each]))
            self._epoch = epoch
        return self._train[self._places[place]]

    def _packed(self, samples: Sequence[TrainingSample], minibatches: int) -> list[list[MicroBatch]]:
        shapes = [
            SampleShape(sample.prompt_length, len(sample.sampled), sample.sample_id, int(sample.sampled.sum()))
            for sample in samples
        ]
        plan = self._batching.plan(shapes, minibatches)
        return self._batching.packs(plan, samples, self._grid.place.data)


def load_tokenizer(model_path: Path, data: DataSpec) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        DataError: there is none, it names no end-of-sequence token, or it has no chat template though one is wanted.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_path))
    except (OSError, ValueError) as error:
        raise DataError(f"{model_path}: cannot load its tokenizer: {error}") from None
    if tokenizer.eos_token_id is None:
        raise DataError(f"{model_path}: the tokenizer names no end-of-sequence token; responses could never end")
    if data.chat_template and not tokenizer.chat_template:
        raise DataError(f"{model_path}: data.chat_template is set, but the tokenizer has no chat template")
    return tokenizer


def _framed(prompt: str, tokenizer: Any, data: DataSpec) -> str:
    if not data.chat_template:
        return prompt
    turns = [{"role": "user", "content": prompt}]
    if data.system_prompt is not None:
        turns.insert(0, {"role": "system", "content": data.system_prompt})
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)


def _sample(row: Row, tokens: Sequence[int], prompt_length: int) -> TrainingSample:
    response = len(tokens) - prompt_length
    return TrainingSample(
        sample_id=row.row_id,
        tokens=np.asarray(tokens, dtype=np.int32),
        prompt_length=prompt_length,
        sampled=np.ones(response, dtype=bool),
        behavior_logprobs=np.zeros(response, dtype=np.float32),
        advantage=1.0,
    )
