"""Uneven pipelines: how many decoder layers each chunk of each stage has, in Megatron's three ways to say it.

Flows in: Megatron's options. Flows out: `Stages`, the arguments `stage_layers` and `prediction_stage` of
`MegatronLayout`. Invariant: the embedding is in the first chunk of the first stage, the head in the last of the last;
chunk c of all stages comes before chunk c + 1 of any.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from slimerl.resharding.layouts import LayoutError, divide

LONGEST_LAYOUT = 100_000
"""Characters of a spelled-out pipeline layout, far beyond any model's: a slip in a count must not fill the memory."""


class Stages(NamedTuple):
    """`MegatronLayout(stage_layers=stages.layers, prediction_stage=stages.prediction, ...)`."""

    layers: tuple[tuple[int, ...], ...]
    """[chunks][stages]"""
    prediction: int | None = None
    """Stage of the multi-token-prediction layer; None: none stated, Megatron takes the last."""


def counted_stages(layers: int, pipeline: int, virtual: int = 1, embedding: bool = False, loss: bool = False) -> Stages:
    """Equal stages where the embedding or the loss counts as one layer
    (account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split).

    Raises:
        LayoutError: the layers do not divide.
    """
    what = "layers, with the embedding and loss that count, over pipeline * virtual"
    each = divide(layers + embedding + loss, pipeline * virtual, what)
    counts = [[each] * pipeline for _ in range(virtual)]
    counts[0][0] -= embedding
    counts[-1][-1] -= loss
    return _stages(counts)


def stages_with_ends(
    layers: int, pipeline: int, virtual: int = 1, first: int | None = None, last: int | None = None
) -> Stages:
    """A first and a last stage of their own size, the others equal (num_layers_in_first_pipeline_stage, ..._last_...).

    Raises:
        LayoutError: the layers do not divide.
    """
    ends = sum(end is not None for end in (first, last))
    middle = layers - (first or 0) - (last or 0)
    if middle < 0 or (pipeline == ends and middle):
        raise LayoutError(
            f"{layers} layers: stages of {first} and {last} at the ends do not leave what others can hold"
        )
    each = divide(middle, pipeline - ends, "layers between the ends over the stages there") if pipeline > ends else 0
    stages = [each] * pipeline
    stages[0] = each if first is None else first
    stages[-1] = each if last is None else last
    in_chunk = [divide(count, virtual, f"{count} layers of a stage over virtual") for count in stages]
    return _stages([in_chunk] * virtual)


def read_stages(text: str, pipeline: int) -> Stages:
    """Megatron's pipeline_model_parallel_layout: `E` embedding, `t` layer, `m` multi-token prediction, `L` loss, `|`
    between stages, `x*3` and `(t|)*29` for repetition, commas for the eye. All stages of a chunk, chunk after chunk.

    Example: `read_stages("Et*3|(tt|)*29,m|L", 32)`: 3 layers, 29 times 2, the prediction layer, the head (DeepSeek-V3).

    Raises:
        LayoutError: another character, a place that Megatron does not allow, or a layout beyond all measure.
    """
    spelled = _spelled_out(text)
    if unknown := set(spelled) - set("EtmL|"):
        raise LayoutError(
            f"pipeline layout {text!r} has {', '.join(sorted(unknown))}; known are E, t, m, L, |, (...)*n"
        )
    stages = spelled.split("|")
    chunks = divide(len(stages), pipeline, f"stages of the pipeline layout {text!r} over pipeline")
    order = spelled.replace("|", "")
    if not re.fullmatch(r"Et*m*L", order):
        raise LayoutError(f"pipeline layout {text!r}: the order must be E, all t, all m, L")
    counts = [
        [stage.count("t") for stage in stages[chunk * pipeline : (chunk + 1) * pipeline]] for chunk in range(chunks)
    ]
    places = [place for place, stage in enumerate(stages) if "m" in stage]
    if len(places) > 1 or any(place < (chunks - 1) * pipeline for place in places):
        raise LayoutError(f"pipeline layout {text!r}: all m must be in one stage, in its last chunk")
    return _stages(counts, places[0] % pipeline if places else None)


def _spelled_out(text: str) -> str:
    """Without commas, blanks and repetitions."""
    spelled = re.sub(r"[,\s]", "", text)
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        # as a real number, which takes any number of digits
        length = sum(len(found[1]) * float(found[2]) for found in re.finditer(repeated, spelled))
        if length > LONGEST_LAYOUT:
            raise LayoutError(
                f"pipeline layout {text!r} would be {length:.4g} characters long, spelled out; lower its counts"
            )
        spelled = re.sub(repeated, lambda found: found[1] * int(found[2]), spelled)
    return spelled


def _stages(counts: Sequence[Sequence[int]], prediction: int | None = None) -> Stages:
    return Stages(tuple(map(tuple, counts)), prediction)
