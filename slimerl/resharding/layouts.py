"""Parallel layouts as values: which part of the model a rank holds, on the trainer's and on the engine's side.

Flows in: sizes. Flows out: for a rank, its share of an axis, its layers, its experts. No process group is needed:
a layout of a thousand ranks is planned in one process. Invariant: a layout never changes, and both kinds answer
the same questions (`Layout`), so that one table of a family serves both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import NamedTuple, Protocol


class LayoutError(ValueError):
    """A model cannot be cut as a layout asks."""


class Axis(Enum):
    """Along what a parameter is cut; a layout answers with the rank's part and the number of parts."""

    NONE = auto()
    """Not cut: every rank holds all of it."""
    DENSE = auto()
    """MLPs that are no experts."""
    ATTENTION = auto()
    EXPERT = auto()
    """Inside one expert."""
    EMBEDDING = auto()
    HEAD = auto()
    SHARED = auto()
    """Experts that every token passes, beside the routed ones."""
    LATENT = auto()
    """Down-projections of multi-head latent attention."""


class ExpertLocation(Enum):
    """Who says which expert an engine keeps in which place."""

    FIXED = auto()
    """The number of the expert."""
    MAPPED = auto()
    """The engine's expert map."""
    COPIED = auto()
    """The engine's expert map, which may name an expert several times."""


class Part(NamedTuple):
    """Part `number` of `of` equal ones."""

    number: int
    of: int


class HeldLayer(NamedTuple):
    """Layer `layer` of the model is called `local` by the rank, in the module whose parameters start with `prefix`."""

    prefix: str
    local: int
    layer: int


class Layout(Protocol):
    """What the tables ask of a layout, for each rank."""

    @property
    def world_size(self) -> int: ...
    def part(self, rank: int, axis: Axis) -> Part: ...
    def layers(self, rank: int, layers: int) -> list[HeldLayer]: ...
    def expert_slots(self, rank: int, experts: int, location: "ExpertLocation", layer: int) -> Sequence[int]:
        """Which of the experts of `layer` each place of the rank for one holds."""

    def first_prefix(self, rank: int) -> str | None: ...
    def last_prefix(self, rank: int) -> str | None: ...
    def norm_prefix(self, rank: int, prediction: bool) -> str | None:
        """Prefix of the module with the final norm; `prediction`: the model has a multi-token-prediction layer."""

    def prediction_prefix(self, rank: int) -> str | None:
        """Prefix of the module with the multi-token-prediction layer; None where the rank does not hold it."""

    def padded_vocabulary(self, vocabulary: int, parts: int) -> int: ...
    @property
    def fused_shared_experts(self) -> bool: ...
    @property
    def up_first(self) -> bool: ...


def divide(whole: int, parts: int, what: str) -> int:
    """`whole / parts`. Raises LayoutError naming `what` where that is no whole number."""
    if whole % parts:
        raise LayoutError(f"{what}: {whole} cannot be cut into {parts} equal parts; choose a size that divides it")
    return whole // parts


def check_sizes(of: object, *no_sizes: str) -> None:
    """Raises LayoutError where integer attributes are below 1, but for `no_sizes`."""
    sizes = {name: value for name, value in vars(of).items() if type(value) is int and name not in no_sizes}
    if wrong := [f"{name} = {value}" for name, value in sizes.items() if value < 1]:
        raise LayoutError(f"{', '.join(wrong)} must be at least 1")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class ModuleNames(StrEnum):
    """Which layer specification names Megatron's parameters."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


class MegatronCoordinates(NamedTuple):
    """Where a rank stands in each parallel dimension."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class MegatronLayout:
    """The trainer's grid in Megatron's default rank order: tensor, context, (expert,) data, pipeline; tensor fastest.

    Example: `MegatronLayout(tensor=2, data=2)`: ranks 0, 1 and 2, 3 are the two tensor-parallel groups.
    """

    tensor: int = 1
    data: int = 1
    context: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Model chunks per pipeline stage; with more than one, parameter names start with `model0.`, `model1.` ..."""
    expert: int = 1
    expert_tensor: int | None = None
    """Tensor parallelism inside an expert; None: the same as `tensor`."""
    stage_layers: tuple[tuple[int, ...], ...] | None = None
    """Uneven pipelines: layers of each stage, one tuple per chunk; None: equal stages."""
    vocabulary_multiple: int = 1
    """The vocabulary is padded to a multiple of this times `tensor` (Megatron's make-vocab-size-divisible-by)."""
    names: ModuleNames = ModuleNames.LOCAL
    prediction_stage: int | None = None
    """Stage whose last chunk has the multi-token-prediction layer; None: the last stage (`stages.py`)."""
    split_latent: bool = False
    """Down-projections of latent attention are cut by rows, as in Megatron's own local specification; otherwise every
    rank holds them whole (Transformer Engine, and this package's portable specification)."""

    def __post_init__(self) -> None:
        check_sizes(self, "prediction_stage")
        grid = self.world_size // self.pipeline
        divide(grid, self.expert_tensor_size * self.expert, "ranks of a stage over expert_tensor * expert")
        if self.virtual > 1 and self.pipeline == 1:
            raise LayoutError("virtual > 1 needs pipeline > 1")
        stages = [(self.virtual, self.pipeline)] if self.stage_layers is None else self._shape_of_stages()
        if any(shape != (self.virtual, self.pipeline) for shape in stages):
            raise LayoutError(
                f"stage_layers {self.stage_layers} must have {self.virtual} chunks of {self.pipeline} stages each"
            )
        if self.prediction_stage is not None and not 0 <= self.prediction_stage < self.pipeline:
            raise LayoutError(f"prediction_stage {self.prediction_stage} is none of {self.pipeline} stages")

    def _shape_of_stages(self) -> list[tuple[int, int]]:
        assert self.stage_layers is not None
        return [(len(self.stage_layers), len(chunk)) for chunk in self.stage_layers] or [(0, 0)]

    @property
    def expert_tensor_size(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    def coordinates(self, rank: int) -> MegatronCoordinates:
        """Raises LayoutError where the layout has no such rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside of a layout of {self.world_size} ranks")
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        in_stage, expert_tensor = divmod(rank % (self.world_size // self.pipeline), self.expert_tensor_size)
        expert_data, expert = divmod(in_stage, self.expert)
        return MegatronCoordinates(tensor, context, data, pipeline, expert_tensor, expert, expert_data)

    @property
    def holders(self) -> list[int]:
        """The ranks that together hold each part of the model once: of everything else the first replica, of experts
        the first of their replicas, which may reach over several of the model's."""
        at = {rank: self.coordinates(rank) for rank in range(self.world_size)}
        return [rank for rank, c in at.items() if c.data == c.context == 0 or c.expert_data == 0]

    def replica(self, data: int) -> list[int]:
        """The ranks that compute the same samples: those of one data-parallel index."""
        return [rank for rank in range(self.world_size) if self.coordinates(rank).data == data]

    def part(self, rank: int, axis: Axis) -> Part:
        at = self.coordinates(rank)
        if axis is Axis.NONE or (axis is Axis.LATENT and not self.split_latent):
            return Part(0, 1)
        if axis is Axis.EXPERT:
            return Part(at.expert_tensor, self.expert_tensor_size)
        return Part(at.tensor, self.tensor)

    def _layers_of_stages(self, layers: int) -> tuple[tuple[int, ...], ...]:
        if self.stage_layers is None:
            each = divide(layers, self.pipeline * self.virtual, "layers over pipeline * virtual")
            return ((each,) * self.pipeline,) * self.virtual
        total = sum(map(sum, self.stage_layers))
        if total != layers:
            raise LayoutError(f"stage_layers {self.stage_layers} place {total} layers, the model has {layers}")
        return self.stage_layers

    def layers(self, rank: int, layers: int) -> list[HeldLayer]:
        """Chunk by chunk; chunk c of all stages comes before chunk c + 1 of any."""
        return list(self._held(self.coordinates(rank).pipeline, self._layers_of_stages(layers)))

    def _held(self, pipeline: int, stages: tuple[tuple[int, ...], ...]) -> Iterator[HeldLayer]:
        first = 0
        for chunk, counts in enumerate(stages):
            for stage, count in enumerate(counts):
                if stage == pipeline:
                    yield from (HeldLayer(self._prefix(chunk), local, first + local) for local in range(count))
                first += count

    def _prefix(self, chunk: int) -> str:
        return "" if self.virtual == 1 else f"model{chunk}."

    def expert_slots(self, rank: int, experts: int, location: ExpertLocation, layer: int) -> Sequence[int]:
        """The rank's experts: Megatron keeps each once, in order."""
        each = divide(experts, self.expert, "experts over expert parallelism")
        first = self.coordinates(rank).expert * each
        return range(first, first + each)

    @property
    def fused_shared_experts(self) -> bool:
        """Never: a way of SGLang."""
        return False

    @property
    def up_first(self) -> bool:
        """Never: a way of SGLang."""
        return False

    def first_prefix(self, rank: int) -> str | None:
        """Prefix of the module with the embedding; None where the rank does not hold it."""
        return self._prefix(0) if self.coordinates(rank).pipeline == 0 else None

    def last_prefix(self, rank: int) -> str | None:
        """Prefix of the module with the final norm and head; None where the rank does not hold it."""
        return self._prefix(self.virtual - 1) if self.coordinates(rank).pipeline == self.pipeline - 1 else None

    def norm_prefix(self, rank: int, prediction: bool) -> str | None:
        """Prefix of the module with the final norm: beside the head, or, in a model with multi-token prediction,
        behind the last layer (TransformerBlock.has_final_layernorm_in_this_stage)."""
        if not prediction or self.stage_layers is None:
            return self.last_prefix(rank)
        chunk, stage = max(
            (chunk, stage)
            for chunk, counts in enumerate(self.stage_layers)
            for stage, count in enumerate(counts)
            if count
        )
        return self._prefix(chunk) if self.coordinates(rank).pipeline == stage else None

    def prediction_prefix(self, rank: int) -> str | None:
        """Prefix of the module with the multi-token-prediction layer; None where the rank does not hold it."""
        stage = self.pipeline - 1 if self.prediction_stage is None else self.prediction_stage
        return self._prefix(self.virtual - 1) if self.coordinates(rank).pipeline == stage else None

    def padded_vocabulary(self, vocabulary: int, parts: int | None = None) -> int:
        """Rows of the trainer's embedding over all ranks."""
        return _round_up(vocabulary, self.vocabulary_multiple * (self.tensor if parts is None else parts))


@dataclass(frozen=True)
class EngineLayout:
    """One SGLang server: `tensor` GPUs in each of `pipeline` stages, tensor fastest; attention may be cut over fewer of
    a stage's GPUs, experts over groups of them.

    Attention is cut over tensor / data_attention / context_attention ranks, an expert over tensor / expert /
    data_expert ranks.
    """

    tensor: int = 1
    expert: int = 1
    data_attention: int = 1
    """SGLang's --dp-size with --enable-dp-attention; 1: off."""
    context_attention: int = 1
    """--attn-cp-size: ranks that share a sequence and hold the same part of attention."""
    data_expert: int = 1
    """--moe-dp-size: groups of ranks that each hold all experts."""
    pipeline: int = 1
    """--pp-size; where layers do not come out even, the last stages have one more each."""
    vocabulary_multiple: int = 64
    head_over_attention: bool = False
    """--enable-dp-lm-head: the output layer is cut like attention."""
    replicated_dense: bool = False
    """--moe-dense-tp-size 1 (DeepSeek, GLM): every rank holds MLPs that are no experts whole."""
    replicated_shared: bool = False
    """Every rank holds shared experts whole: SGLANG_SHARED_EXPERT_TP1 (DeepSeek), or an all-to-all backend."""
    fused_shared_experts: bool = False
    """The shared expert is one more slice behind each rank's routed experts; off with --disable-shared-experts-fusion.
    """
    redundant_experts: int = 0
    """--ep-num-redundant-experts: places beyond one for each expert."""
    expert_map: tuple[tuple[int, ...], ...] | None = None
    """For each layer, the expert in each place (SGLang's physical_to_logical_map); None: place i has expert i modulo
    their number."""
    up_first: bool = False
    """Unquantised experts of the flashinfer_cutlass backend: w13 is [up; gate]."""

    def __post_init__(self) -> None:
        check_sizes(self, "redundant_experts")
        divide(self.tensor, self.expert * self.data_expert, "engine tensor over expert * data_expert")
        divide(
            self.tensor,
            self.data_attention * self.context_attention,
            "engine tensor over data_attention * context_attention",
        )

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline

    def _stage_and_rank(self, rank: int) -> tuple[int, int]:
        """The stage, and the rank in it. Raises LayoutError where the engine has no such rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside of an engine of {self.world_size} ranks")
        return divmod(rank, self.tensor)

    def part(self, rank: int, axis: Axis) -> Part:
        parts = self._parts(axis)
        return Part(self._stage_and_rank(rank)[1] % parts, parts)

    def _parts(self, axis: Axis) -> int:
        whole = {
            Axis.NONE: True,
            Axis.LATENT: True,
            Axis.DENSE: self.replicated_dense,
            Axis.SHARED: self.replicated_shared,
        }
        if whole.get(axis, False):
            return 1
        if axis is Axis.EXPERT:
            return self.tensor // (self.expert * self.data_expert)
        over_attention = axis is Axis.ATTENTION
        over_attention |= axis is Axis.EMBEDDING and self.data_attention > 1
        over_attention |= axis is Axis.HEAD and self.head_over_attention
        return self.tensor // (self.data_attention * self.context_attention) if over_attention else self.tensor

    def layers(self, rank: int, layers: int) -> list[HeldLayer]:
        stage, _ = self._stage_and_rank(rank)
        each, longer = divmod(layers, self.pipeline)
        first = stage * each + max(0, stage - (self.pipeline - longer))
        count = each + (stage >= self.pipeline - longer)
        return [HeldLayer("", layer, layer) for layer in range(first, first + count)]

    def expert_slots(self, rank: int, experts: int, location: ExpertLocation, layer: int) -> Sequence[int]:
        """The expert in each of the rank's places.

        Raises:
            LayoutError: the places do not divide over the ranks, the model cannot have redundant experts, or the map
                has not as many places.
        """
        _, in_stage = self._stage_and_rank(rank)
        places = experts + self.redundant_experts
        if self.redundant_experts and location is not ExpertLocation.COPIED:
            raise LayoutError(
                f"{self.redundant_experts} redundant experts: SGLang loads none for this model or its draft model; "
                "set redundant_experts to 0"
            )
        each = divide(places, self.expert, "experts over the engine's expert parallelism")
        inside = self._parts(Axis.EXPERT)
        first = in_stage % (inside * self.expert) // inside * each
        if self.expert_map is None or location is ExpertLocation.FIXED:
            return [place % experts for place in range(first, first + each)]
        if layer >= len(self.expert_map) or len(self.expert_map[layer]) != places:
            raise LayoutError(f"expert_map has not {places} places for layer {layer}")
        return self.expert_map[layer][first : first + each]

    def first_prefix(self, rank: int) -> str | None:
        return "" if self._stage_and_rank(rank)[0] == 0 else None

    def last_prefix(self, rank: int) -> str | None:
        return "" if self._stage_and_rank(rank)[0] == self.pipeline - 1 else None

    def norm_prefix(self, rank: int, prediction: bool) -> str | None:
        return self.last_prefix(rank)

    def prediction_prefix(self, rank: int) -> str | None:
        return self.last_prefix(rank)

    def padded_vocabulary(self, vocabulary: int, parts: int | None = None) -> int:
        """SGLang pads to 64, and to 64 times the ranks where that does not come out even."""
        parts = self.tensor if parts is None else parts
        padded = _round_up(vocabulary, self.vocabulary_multiple)
        return padded if padded % parts == 0 else _round_up(vocabulary, self.vocabulary_multiple * parts)
