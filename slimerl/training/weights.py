"""Weights between a Hugging Face checkpoint and the model chunks of this rank.

Flows in: a checkpoint directory, the chunks. Flows out: filled parameters; a new checkpoint directory. The mapping
itself is `slimerl.resharding`'s: one table per family serves loading, export and the weight sync.
Invariant: loading and exporting without a step between gives the same tensors under the same names, bit for bit.
That holds for what the trainer does not build, too: the multi-token-prediction layer is copied from the checkpoint that
the model was loaded from, and a name that repeats another tensor there (a tied head) repeats it again.
"""

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from slimerl.resharding.assemble import scatter
from slimerl.resharding.buckets import split_into_buckets
from slimerl.resharding.families import Family, family_of
from slimerl.resharding.families.family import PLAIN, Form, stored_form
from slimerl.resharding.families.score import SCORE
from slimerl.resharding.gather import Gather
from slimerl.resharding.hf_checkpoint import HfCheckpoint, check_keys, write_checkpoint
from slimerl.resharding.layouts import MegatronLayout
from slimerl.resharding.tensors import LogicalTensor, Placement
from slimerl.spec.schema import ParallelSpec
from slimerl.training.capabilities import Capabilities
from slimerl.training.model import unwrapped
from slimerl.training.parallel import Grid
from slimerl.training.trainer_layout import trainer_layout

EXPORT_BUCKET_BYTES = 256 * 2**20
"""Gathered at once while exporting."""


@dataclass(frozen=True)
class ModelMap:
    """Where every part of the model lies, on every rank of the trainer."""

    config: Mapping[str, Any]
    family: Family
    layout: MegatronLayout
    form: Form = PLAIN
    """`family.SCORED`: a reward model, a critic."""

    def vocabulary_rows(self, vocabulary: int) -> int:
        """Rows of the embedding over all ranks, padding included."""
        return self.layout.padded_vocabulary(vocabulary)

    def placements(self, rank: int) -> list[Placement]:
        return self.family.megatron_placements(self.config, self.layout, rank, self.form)

    def logical_tensors(self, dtype: torch.dtype | None = None) -> list[LogicalTensor]:
        return self.family.logical_tensors(self.config, dtype, self.form)


def model_map(
    config: Mapping[str, Any], parallel: ParallelSpec, capabilities: Capabilities, form: Form = PLAIN
) -> ModelMap:
    """The map of the model of this `config.json`. Raises ConfigError or LayoutError, naming the key."""
    return ModelMap(config, family_of(config), trainer_layout(config, parallel, capabilities), form)


PLACED_BUFFER = "router.expert_bias"
"""The one kind of persistent buffer that belongs to the model: the router's correction bias."""


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's parameters, and the buffers that placements name, under the names that placements use: wrappers left
    out, `model1.` for chunk 1 of many. Parameters come before buffers."""
    prefixes = [""] if len(chunks) == 1 else [f"model{index}." for index in range(len(chunks))]
    models = [(prefix, unwrapped(chunk)) for prefix, chunk in zip(prefixes, chunks, strict=True)]
    found: dict[str, torch.Tensor] = {
        prefix + name: parameter for prefix, model in models for name, parameter in model.named_parameters()
    }
    for prefix, model in models:
        found |= {prefix + name: buffer for name, buffer in model.named_buffers() if name.endswith(PLACED_BUFFER)}
    return found


def keep_buffers_wide(parameters: Mapping[str, torch.Tensor]) -> None:
    """Call it before they are filled: Megatron's bf16 wrapper rounds them with the rest, and widens them again only in
    the first forward pass."""
    for name, tensor in parameters.items():
        if name.endswith(PLACED_BUFFER):
            tensor.data = tensor.data.float()


def load_weights(chunks: Sequence[torch.nn.Module], checkpoint: Path, where: ModelMap, rank: int) -> None:
    """Fill every parameter of this rank; a checkpoint of another dtype is converted.

    A scalar head that the checkpoint does not have, that of a language model, begins as zeros: every score is 0 at
    first, on every layout.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    parameters = named_parameters(chunks)
    keep_buffers_wide(parameters)
    family, config = where.family, where.config
    with HfCheckpoint(checkpoint) as tensors:
        form = stored_form(tensors) if where.form.score else where.form
        built = family.logical_tensors(config, form=form)
        check_keys(tensors, built, family.aliases(config, form), family.unused_tensors(config, form))
        head = {each.name: torch.zeros(each.shape) for each in where.logical_tensors() if each.name == SCORE}
        # a map of its own: it is only read
        scatter(where.placements(rank), ChainMap(cast(Any, tensors), head), parameters, cast=True)


def export_weights(
    chunks: Sequence[torch.nn.Module],
    destination: Path,
    source: Path,
    where: ModelMap,
    grid: Grid,
    bucket_bytes: int = EXPORT_BUCKET_BYTES,
) -> None:
    """Write the model as a Hugging Face checkpoint in its own dtype, with the other files of checkpoint `source` and
    those of its tensors that the trainer does not build.

    The ranks that hold the model once gather, the first writes; the others have nothing to do. An existing
    `destination` is replaced once the new one is complete.
    """
    if not grid.is_holder:
        return
    parameters = named_parameters(chunks)
    dtype = next(iter(parameters.values())).dtype
    tensors = where.family.checkpoint_tensors(where.config, dtype, where.form)
    gather = Gather(
        [where.placements(rank) for rank in grid.holder_ranks],
        split_into_buckets(tensors, where.family.fused_groups(where.config, where.form), bucket_bytes),
        grid.holders,
    )
    gathered = (pair for bucket in gather.run(parameters) for pair in bucket)
    if grid.is_first:
        with HfCheckpoint(source) as given:
            tensors_of_all = gathered if where.form.score else _completed(gathered, given, where)
            changed = scored_config(where.config) if where.form.score else {}
            write_checkpoint(destination, tensors_of_all, source, overwrite=True, changed=changed)
    else:
        for _ in gathered:
            raise AssertionError("only the first rank of a group receives tensors")


def scored_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` of a model with a scalar head says otherwise, for transformers and SGLang."""
    architectures = config.get("architectures") or []
    return {
        "architectures": [each.replace("ForCausalLM", "ForSequenceClassification") for each in architectures],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def _completed(
    gathered: Iterable[tuple[str, torch.Tensor]], given: HfCheckpoint, where: ModelMap
) -> Iterator[tuple[str, torch.Tensor]]:
    """The gathered tensors; those of `given` that repeat one of them, with its new values; those that are not built."""
    repeated = {name: of for name, of in where.family.aliases(where.config).items() if name in given}
    for name, tensor in gathered:
        yield name, tensor
        yield from ((alias, tensor) for alias, of in repeated.items() if of == name)
    for name in sorted(where.family.unused_tensors(where.config) & given.keys()):
        yield name, given[name]
