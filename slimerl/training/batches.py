"""Samples → the tensors of one micro-batch: sequences one after the other, and the tokens that count.

Flows in: `TrainingSample`s. Flows out: a `MicroBatch`. Invariants: the per-token tensors have one entry for each
*sampled* token, in the order of the pack; prompt, tool and padding tokens have none. What stands behind a sample's
last sampled token, that token itself included, predicts nothing and is not computed.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slimerl.algorithms import BatchTotals
from slimerl.samples.sample import NO_EXPERT
from slimerl.training.model import WantedTokens
from slimerl.training.routing_record import RoutedShape, RoutingRecord, checked_routing, prompt_routing
from slimerl.training.segments import UNSPREAD, Laid, Segment, Stripes, lay_segments
from slimerl.training.thd import lay_sequences
from slimerl.training.training_sample import TrainingSample

PADDING_TOKEN = 0
"""Any id of the vocabulary will do: nothing is read at its position."""


@dataclass(frozen=True)
class PackForm:
    """How packs look for this rank.

    Args:
        tensor: tensor-parallel ranks; sequence parallelism cuts a pack into as many equal parts.
        stripes: this rank's place among the context-parallel ranks.
        shared_prefix: samples with equal prompts compute it once; needs `segmented`.
        segmented: for this package's own attention; otherwise for Transformer Engine's (THD).
        routed: micro-batches carry the experts that the engine chose; None: they carry a record that is empty.
        scores: asked for is what stands at each sampled token, the last included, and not what predicts it.
    """

    tensor: int = 1
    stripes: Stripes = UNSPREAD
    shared_prefix: bool = False
    segmented: bool = True
    device: torch.device | str = "cpu"
    routed: RoutedShape | None = None
    scores: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """One pack, as this rank computes it.

    Args:
        tokens: [1, tokens of this context-parallel rank].
        wanted: positions of this rank, and the tokens that are asked for there.
        places: for each wanted token its place among the pack's sampled tokens; None: all, in order.
        behavior_logprobs: [sampled tokens of the pack].
        advantages: [sampled tokens of the pack]; those of the samples, or, where advantages differ from token to
            token, the samples' outcomes until these are known.
        sequence: [sampled tokens of the pack], the sample of each, counted within the pack, ascending.
        totals: of the minibatch.
        computed_tokens: of the whole pack, padding included.
        proximal_logprobs, reference_logprobs, teacher_logprobs: [sampled tokens of the pack], where they are asked for
            and known (on the last pipeline stage), from the start of the step on.
        old_values, returns: [sampled tokens of the pack], of the critic, as these.
        routing: which experts the tokens are given, where that is replayed.
        margins: [pairs], in the order of `sequence`, where scores are asked for.
    """

    tokens: torch.Tensor
    packed: PackedSeqParams
    wanted: WantedTokens
    places: torch.Tensor | None
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence: torch.Tensor
    sequences: int
    totals: BatchTotals
    computed_tokens: int
    padding_tokens: int
    proximal_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    routing: RoutingRecord = field(default_factory=RoutingRecord)
    old_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    margins: torch.Tensor | None = None

    @property
    def sampled_tokens(self) -> int:
        return len(self.advantages)


def pack(
    samples: Sequence[TrainingSample], temperature: float, form: PackForm, totals: BatchTotals | None = None
) -> MicroBatch:
    """Put samples one after the other; no samples at all make a pack of padding alone.

    Args:
        temperature: of sampling.
        totals: of the minibatch; default: these samples are all of it.
    """
    line = _line_up(samples, form)
    laid = _lay(line, form)
    tokens = np.full(laid.total, PADDING_TOKEN, dtype=np.int64)
    tokens[laid.where] = line.tokens
    local = np.full(laid.total, -1, dtype=np.int64)
    local[laid.own] = np.arange(len(laid.own))
    asked = local[laid.where[line.before]]
    here = np.flatnonzero(asked >= 0)

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(form.device)

    return MicroBatch(
        tokens=on_device(tokens[laid.own])[None],
        packed=laid.packed,
        wanted=WantedTokens(on_device(asked[here]), on_device(line.answers[here]), temperature),
        places=on_device(here) if form.stripes.size > 1 else None,
        behavior_logprobs=on_device(line.behavior),
        advantages=on_device(np.array([sample.advantage for sample in samples], np.float32)[line.sample]),
        sequence=on_device(line.sequence),
        sequences=len(samples),
        totals=totals or BatchTotals(len(line.answers), len(samples), len(samples)),
        computed_tokens=laid.total,
        padding_tokens=laid.total - len(line.tokens),
        routing=_routing(line, laid, samples, form),
        margins=on_device(_margins(line, samples)) if form.scores else None,
    )


def pack_nothing(device: torch.device) -> MicroBatch:
    """No tokens, with everything that may be asked for: what a rank that knows no log-probabilities names figures
    with."""
    nothing = pack([], 1.0, PackForm(device=device))
    none = nothing.advantages
    # means over samples or pairs divide by their number, and there are no terms
    totals = BatchTotals(tokens=0, sequences=1, groups=1)
    nothing = replace(nothing, totals=totals, proximal_logprobs=none, reference_logprobs=none)
    return replace(nothing, old_values=none, returns=none)


@dataclass(frozen=True)
class _Line:
    """Samples one after the other, without padding. Of each sampled token: `before`, the token that predicts it (with
    `PackForm.scores` the token itself); `answers`, its id; `behavior`, its log-probability while sampling; `sample`,
    whose it is, and `sequence`, the same counted in the order of the line."""

    segments: list[Segment]
    tokens: np.ndarray
    before: np.ndarray
    answers: np.ndarray
    behavior: np.ndarray
    sample: np.ndarray
    sequence: np.ndarray
    runs: list["_Run"]


@dataclass(frozen=True)
class _Run:
    """Tokens [start, stop) of these samples, which agree in them."""

    samples: list[int]
    start: int
    stop: int


def _line_up(samples: Sequence[TrainingSample], form: PackForm) -> _Line:
    back = 0 if form.scores else 1
    alike: dict[object, list[int]] = defaultdict(list)
    for number, sample in enumerate(samples):
        alike[sample.tokens[: sample.prompt_length].tobytes() if form.shared_prefix else number].append(number)
    segments: list[Segment] = []
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    runs: list[_Run] = []
    end = 0
    for numbers in alike.values():
        parent = None
        if len(numbers) > 1:
            first = samples[numbers[0]]
            parent = len(segments)
            segments.append(Segment(end, first.prompt_length))
            parts["tokens"].append(first.tokens[: first.prompt_length])
            runs.append(_Run(numbers, 0, first.prompt_length))
            end += first.prompt_length
        prompt_end = end
        for number in numbers:
            sample = samples[number]
            sampled = np.flatnonzero(sample.sampled)
            stop = sample.prompt_length + int(sampled.max(initial=back - 1)) + (1 - back)
            computed = sample.tokens[:stop]
            own = computed if parent is None else computed[sample.prompt_length :]
            # the response's first token would stand here
            response = end + sample.prompt_length if parent is None else end
            before = response + sampled - back
            if parent is not None and back:
                before[sampled == 0] = prompt_end - 1
            if len(own):
                segments.append(Segment(end, len(own), parent))
            parts["tokens"].append(own)
            runs.append(_Run([number], len(computed) - len(own), len(computed)))
            parts["before"].append(before)
            parts["answers"].append(sample.tokens[sample.prompt_length :][sampled])
            parts["behavior"].append(sample.behavior_logprobs[sampled])
            parts["sequence"].append(np.full(len(sampled), len(parts["sample"])))
            parts["sample"].append(np.full(len(sampled), number))
            end += len(own)
    integers = ("tokens", "before", "answers", "sample", "sequence")
    joined = {name: np.concatenate([_NO_INTEGERS, *parts[name]]) for name in integers}
    return _Line(segments, behavior=np.concatenate([_NO_REALS, *parts["behavior"]]), runs=runs, **joined)


def _margins(line: _Line, samples: Sequence[TrainingSample]) -> np.ndarray:
    """[pairs], in the order of the line, in which samples of one prompt stand together."""
    firsts = np.flatnonzero(np.diff(line.sequence, prepend=-1))
    return np.array([samples[number].margin for number in line.sample[firsts][::2]], np.float32)


_NO_INTEGERS = np.empty(0, dtype=np.int64)
_NO_REALS = np.empty(0, dtype=np.float32)


def _lay(line: _Line, form: PackForm) -> Laid:
    if form.segmented:
        return lay_segments(line.segments, form.tensor, form.stripes, form.device)
    return lay_sequences([segment.length for segment in line.segments], form.tensor, form.stripes, form.device)


def _routing(line: _Line, laid: Laid, samples: Sequence[TrainingSample], form: PackForm) -> RoutingRecord:
    shape = form.routed
    if shape is None:
        return RoutingRecord()
    known = [checked_routing(sample, shape) for sample in samples]
    whole = np.full((laid.total, shape.layers, shape.experts_per_token), NO_EXPERT, dtype=np.int16)
    rows = [prompt_routing([known[number] for number in run.samples], run.stop)[run.start :] for run in line.runs]
    whole[laid.where] = np.concatenate([whole[:0], *rows])
    unrecorded = (whole[laid.where[line.before], -1, 0] == NO_EXPERT).astype(np.float32)
    return RoutingRecord(torch.from_numpy(whole[laid.own]), torch.from_numpy(unrecorded).to(form.device))
