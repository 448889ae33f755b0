"""Copies between logical tensors and the parameters of one rank.

Flows in: placements, named tensors. Flows out: the same bytes in the other layout; nothing is computed on them but,
where asked for, a change of dtype. Invariant: what is written is checked to be written exactly once, before the copy.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from slimerl.resharding.coverage import CoverageError, check_parameters, some_names
from slimerl.resharding.tensors import Placement


def scatter(
    placements: Sequence[Placement],
    logical: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    cast: bool = False,
) -> None:
    """Fill all `parameters` of a rank from logical tensors; padding becomes zero.

    `logical` may load lazily (`HfCheckpoint`): each tensor is asked for once.

    Args:
        cast: convert where the dtypes differ (a bf16 checkpoint into fp32 parameters); otherwise that is an error.

    Raises:
        CoverageError: a parameter is not covered exactly once, or parameters and placements differ in their names.
        KeyError: a logical tensor is missing.
        TypeError: dtypes differ and `cast` is False.
    """
    check_parameters(placements, {name: tuple(tensor.shape) for name, tensor in parameters.items()})
    with torch.no_grad():
        for name, group in groupby(sorted(placements, key=_tensor_name), key=_tensor_name):
            if not name:
                for placement in group:
                    placement.view_of(parameters[placement.parameter]).zero_()
                continue
            if name not in logical:
                raise KeyError(f"logical tensor {name} is needed, but not given")
            source = logical[name]
            for placement in group:
                if not placement.box.inside(tuple(source.shape)):
                    raise CoverageError(f"{name} has shape {tuple(source.shape)}, but {placement.box} of it is needed")
                target = placement.view_of(parameters[placement.parameter])
                _check_dtypes(placement, source, target, cast)
                target.copy_(source[placement.box.slices])


def collect(
    placements: Sequence[Placement],
    parameters: Mapping[str, torch.Tensor],
    out: Mapping[str, torch.Tensor],
    cast: bool = False,
) -> None:
    """Copy a rank's part of the logical tensors into `out`; the other ranks' parts are left as they are.

    `coverage.owned_placements` over all ranks shows that nothing is left out. `cast` as in `scatter`.

    Raises:
        CoverageError: a placement needs a parameter that is not given, or does not fit.
        KeyError: `out` lacks a tensor.
    """
    if missing := {placement.parameter for placement in placements} - parameters.keys():
        raise CoverageError(f"parameters are needed, but not given: {some_names(missing)}")
    with torch.no_grad():
        for placement in placements:
            if placement.is_padding:
                continue
            parameter = parameters[placement.parameter]
            if not placement.at.inside(tuple(parameter.shape)):
                raise CoverageError(f"{placement.parameter}: {placement.at} does not lie in {tuple(parameter.shape)}")
            if placement.tensor not in out:
                raise KeyError(f"no tensor to collect {placement.tensor} into")
            source, target = placement.view_of(parameter), out[placement.tensor]
            if not placement.box.inside(tuple(target.shape)):
                raise CoverageError(f"{placement.tensor}: {placement.box} does not lie in {tuple(target.shape)}")
            _check_dtypes(placement, target, source, cast)
            target[placement.box.slices].copy_(source)


def _tensor_name(placement: Placement) -> str:
    return placement.tensor


def _check_dtypes(placement: Placement, logical: torch.Tensor, parameter: torch.Tensor, cast: bool) -> None:
    if logical.dtype != parameter.dtype and not cast:
        raise TypeError(
            f"{placement.tensor} is {logical.dtype}, {placement.parameter} is {parameter.dtype}; "
            "pass cast=True if the conversion is meant"
        )
