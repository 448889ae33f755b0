"""FP8 in blocks, made on the trainer's side: what goes on the wire are the destination's bytes already.

Flows in: matrices, or a rank's parts of them, in the trainer's dtype; the format of the engines (`BlockScales`). Flows
out: FP8 (e4m3) data and one float32 scale for each block; `data * scale` gives the weight back.
Invariant: the bytes of a block depend on the elements of the block alone, so that the parts of a tensor that are cut at
block borders have the bytes of the whole.

Format: DeepSeek-V3 (arXiv 2412.19437, section 3.3), as SGLang and transformers read it: `X.weight_scale_inv` holds for
each block the number by which its FP8 values are multiplied.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slimerl.resharding.boxes import Box
from slimerl.resharding.families.scales import BlockScales, scale_name
from slimerl.resharding.tensors import LogicalTensor, Placement

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest value of float8_e4m3fn."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: a smaller scale would lose digits, or be flushed to zero by a GPU."""
LARGEST_POWER = 119
"""2^119 * 448 is still a float32; with 2^120 the largest weights would come back as infinity."""
NAN_BYTE = 0x7F
BAND_ELEMENTS = 1 << 20
"""Elements that are converted at once: the float32 copies stay in a CPU's cache, and small beside the matrix."""

_SOURCES = (torch.bfloat16, torch.float16, torch.float32)


class Quantised(NamedTuple):
    """`data`: [rows, columns], FP8. `scales`: [blocks of rows, blocks of columns], float32."""

    data: torch.Tensor
    scales: torch.Tensor


def quantise(matrix: torch.Tensor, scales: BlockScales) -> Quantised:
    """A matrix [rows, columns] that begins at a block border; blocks at its far ends may be smaller.

    The scale of a block is its largest finite magnitude / 448 (1 where the block is all zero), with
    `scales.powers_of_two` rounded up to a power of two. What is not finite becomes NaN in its place: a broken weight
    stays visible, and its neighbours keep their values.

    Raises:
        ValueError: no matrix, or of a dtype that is not bfloat16, float16 or float32.
    """
    if matrix.dim() != 2 or matrix.dtype not in _SOURCES:
        raise ValueError(
            f"{matrix.dtype} {tuple(matrix.shape)}: FP8 blocks are made of a matrix in bfloat16, float16 or float32"
        )
    rows, columns = matrix.shape
    data = torch.empty(rows, columns, dtype=FP8, device=matrix.device)
    found = torch.empty(scales.blocks(rows), scales.blocks(columns), dtype=torch.float32, device=matrix.device)
    with torch.no_grad():
        height = max(1, BAND_ELEMENTS // max(1, scales.block * columns)) * scales.block
        for top in range(0, rows, height):
            band = matrix[top : top + height]
            first = top // scales.block
            of_band = found[first : first + scales.blocks(len(band))]
            data[top : top + height] = _quantise_band(band.float(), scales, of_band)
    return Quantised(data, found)


def _quantise_band(band: torch.Tensor, scales: BlockScales, found: torch.Tensor) -> torch.Tensor:
    """FP8 of some rows of blocks; fills their scales into `found`."""
    block, (rows, columns) = scales.block, band.shape
    padded = F.pad(band, (0, -columns % block, 0, -rows % block))
    tiles = padded.view(found.shape[0], block, found.shape[1], block)
    finite = tiles.isfinite()
    largest = tiles.abs().masked_fill_(~finite, 0.0).amax(dim=(1, 3))
    scale = (largest / LARGEST).clamp_(min=SMALLEST_SCALE).masked_fill_(largest == 0, 1.0)
    found.copy_(_next_power_of_two(scale) if scales.powers_of_two else scale)
    # The quotient may round to a bit more than the largest value.
    scaled = (tiles / found[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(FP8)
    # How a NaN is converted differs between machines; its byte must not.
    scaled.view(torch.uint8).masked_fill_(~finite, NAN_BYTE)
    return scaled.view(padded.shape)[:rows, :columns]


def _next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The same or the next power of two, by the bits of positive normal float32 numbers (UE8M0: an exponent alone)."""
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent.clamp_(max=127 + LARGEST_POWER) << 23).view(torch.float32)


def dequantise(quantised: Quantised, scales: BlockScales, dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    """[rows, columns]: each FP8 value times the scale of its block, computed in float32.

    Args:
        first: which row of its block the first row is.
    """
    rows, columns = (
        torch.arange(start, start + size, device=quantised.data.device) // scales.block
        for start, size in zip((first, 0), quantised.data.shape, strict=True)
    )
    return (quantised.data.float() * quantised.scales[rows][:, columns]).to(dtype)


def on_the_wire(
    bucket: Iterable[tuple[str, torch.Tensor]], planned: Mapping[str, LogicalTensor], scales: BlockScales
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors in the trainer's dtype as the engines hold them: FP8 data, its scales behind it; the rest as it is.

    Args:
        planned: the engine's tensors by name (`Family.logical_tensors` with a `Form` that has these scales): it says
            what is quantised, and not a pattern of names.

    Raises:
        ValueError: a tensor that the engines do not have.
    """
    for name, tensor in bucket:
        if name not in planned:
            raise ValueError(f"{name}: the engines have no such tensor; plan the sync in the form of this model")
        if planned[name].dtype != FP8:
            yield name, tensor
            continue
        quantised = quantise(tensor, scales)
        yield name, quantised.data
        yield scale_name(name), quantised.scales


def quantise_parameter(
    parameter: torch.Tensor, placements: Sequence[Placement], shapes: Mapping[str, tuple[int, ...]], scales: BlockScales
) -> Quantised:
    """A rank's parameter, as the engines want its pieces.

    Pieces of one tensor that follow each other in it (the heads in Megatron's linear_qkv) are quantised together: a
    block may reach over several.

    Args:
        parameter: [rows, columns] in the trainer's dtype.
        placements: that tile it, from its first row to its last.
        shapes: of the logical tensors.

    Returns:
        Data in the shape of the parameter; scales of the pieces, one piece's below the other's (the order in which
        `planner.templates.Parameter.scales` counts): those of the blocks that begin in the piece.

    Raises:
        LayoutError: the rank's part of a tensor ends inside a block (`BlockScales.check_whole`). The planner refuses
            such layouts before.
    """
    data = torch.empty(parameter.shape, dtype=FP8, device=parameter.device)
    rows_of: dict[int, torch.Tensor] = {}
    for run in _runs(placements):
        box = Box(placements[run[0]].box.starts, placements[run[-1]].box.stops)
        first_piece = placements[run[0]]
        held = f"{first_piece.tensor}: this rank ({first_piece.parameter})"
        scales.check_whole(held, box, shapes[first_piece.tensor])
        made = quantise(torch.cat([placements[at].view_of(parameter) for at in run]), scales)
        for at in run:
            place = placements[at].box
            inside = place.relative_to(box)
            placements[at].view_of(data).copy_(made.data[inside.slices])
            first = scales.blocks(box.starts[0])
            rows_of[at] = made.scales[scales.blocks(place.starts[0]) - first : scales.blocks(place.stops[0]) - first]
    return Quantised(data, torch.cat([rows_of[at] for at in range(len(placements))]))


def _runs(placements: Sequence[Placement]) -> list[list[int]]:
    """Numbers of placements whose boxes follow each other row by row in one tensor."""
    order = sorted(range(len(placements)), key=lambda at: (placements[at].tensor, placements[at].box.starts))
    runs: list[list[int]] = []
    for at in order:
        if runs and _follows(placements[runs[-1][-1]], placements[at]):
            runs[-1].append(at)
        else:
            runs.append([at])
    return runs


def _follows(above: Placement, below: Placement) -> bool:
    same_columns = (above.box.starts[1:], above.box.stops[1:]) == (below.box.starts[1:], below.box.stops[1:])
    return above.tensor == below.tensor and same_columns and above.box.stops[0] == below.box.starts[0]
