"""Registering a patch: what makes it a no-op under CUDA, and `apply()`."""

import functools
from collections.abc import Callable
from importlib.metadata import version

import torch

MEGATRON_VERSIONS = ("0.16.1",)
"""The megatron-core versions that the patches were tried with."""

Patch = Callable[[], None]
PATCHES: list[Patch] = []
"""In the order in which `apply` runs them; each does nothing where CUDA is present."""

_applied: set[str] = set()


class UnknownMegatronVersion(RuntimeError):
    """The patches were not tried with the installed megatron-core."""


def cpu_patch(patch: Patch, before_imports: bool = False) -> Patch:
    """Register `patch` and make it a no-op where CUDA is present. Applying it twice has no further effect.

    `before_imports`: before the others, which import modules of Megatron.
    """

    @functools.wraps(patch)
    def guarded() -> None:
        if torch.cuda.is_available() or patch.__name__ in _applied:
            return
        patch()
        _applied.add(patch.__name__)

    PATCHES.insert(0 if before_imports else len(PATCHES), guarded)
    return guarded


def apply() -> None:
    """Make megatron-core run without CUDA; does nothing where CUDA is present or when done already.

    Raises:
        UnknownMegatronVersion: the installed megatron-core is not one that the patches were tried with.
    """
    if torch.cuda.is_available():
        return
    found = version("megatron-core")
    if found not in MEGATRON_VERSIONS:
        raise UnknownMegatronVersion(
            f"megatron_patches were tried with megatron-core {', '.join(MEGATRON_VERSIONS)}, found {found}; "
            "install one of these, or run the tests with the new one and add it to MEGATRON_VERSIONS"
        )
    for patch in PATCHES:
        patch()
