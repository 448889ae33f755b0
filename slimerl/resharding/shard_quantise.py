"""What a trainer rank sends of a model that engines hold in FP8 blocks: data and scales, made of its own parameters.

Flows in: a rank's parameters and placements. Flows out: parameters as they travel, by name; beside a quantised one its
scales, under a name of their own, with placements. Invariant: the planner has refused layouts in which a block lies in
two ranks, so that no rank needs another's elements.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from slimerl.resharding.boxes import Box
from slimerl.resharding.families import BlockScales
from slimerl.resharding.families.scales import scale_name
from slimerl.resharding.quantise import FP8, quantise_parameter
from slimerl.resharding.tensors import LogicalTensor, Placement

_SCALES = ":scales"


def wire_name(parameter: str, scales: bool) -> str:
    """Of a parameter as it travels, or of its scales."""
    return parameter + _SCALES if scales else parameter


def scale_placements(
    placements: Sequence[Placement], tensors: Mapping[str, LogicalTensor], scales: BlockScales
) -> list[Placement]:
    """Where the scales of a rank's quantised parameters lie: those of each piece, one piece's below the other's."""
    used: dict[str, int] = defaultdict(int)
    found = []
    for placement in placements:
        if placement.is_padding or placement.tensor not in tensors or tensors[placement.tensor].dtype != FP8:
            continue
        starts, stops = (tuple(map(scales.blocks, ends)) for ends in (placement.box.starts, placement.box.stops))
        rows, columns = stops[0] - starts[0], stops[1] - starts[1]
        first = used[placement.parameter]
        used[placement.parameter] += rows
        if rows:
            at = Box((first, 0), (first + rows, columns))
            name = wire_name(placement.parameter, True)
            found.append(Placement(name, at, scale_name(placement.tensor), Box(starts, stops)))
    return found


class WireParameters(Mapping[str, torch.Tensor]):
    """A rank's parameters, quantised when they are first asked for, and kept as long as this is: for one transfer."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        placements: Sequence[Placement],
        tensors: Mapping[str, LogicalTensor],
        scales: BlockScales,
    ) -> None:
        self._parameters, self._scales = parameters, scales
        self._placements: dict[str, list[Placement]] = defaultdict(list)
        for placement in placements:
            if placement.tensor in tensors and tensors[placement.tensor].dtype == FP8:
                self._placements[placement.parameter].append(placement)
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = name.removesuffix(_SCALES)
        if parameter not in self._placements:
            return self._parameters[name]
        if name not in self._made:
            made = quantise_parameter(
                self._parameters[parameter], self._placements[parameter], self._shapes, self._scales
            )
            self._made[parameter], self._made[wire_name(parameter, True)] = made.data, made.scales
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._parameters
        yield from (wire_name(name, True) for name in self._placements)

    def __len__(self) -> int:
        return len(self._parameters) + len(self._placements)
