"""Patches without which a CPU run is right, but slow."""

import sys
from functools import partial
from typing import Any

import torch

from megatron_patches.device import import_quietly
from megatron_patches.registry import cpu_patch


@partial(cpu_patch, before_imports=True)
def torch_compile_off() -> None:
    """`@jit_fuser` is torch.compile: minutes of C++ compilation before the first step of a tiny model. To wrap a
    function alone, at import, loads the compiler: a third of what a rank takes to start.

    For megatron-core 0.16.1: all modules under fusions/ and the rotary embedding.
    """

    def as_it_is(model: Any = None, **_: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = as_it_is
    # these are excluded from compilation: to call one loads the compiler, too
    for excluded in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        method = getattr(torch.optim.Optimizer, excluded)
        setattr(torch.optim.Optimizer, excluded, getattr(method, "__wrapped__", method))
    if "torch._dynamo" in sys.modules:  # functions may be wrapped already
        torch._dynamo.config.disable = True


@cpu_patch
def packed_rope_without_a_loop() -> None:
    """The rotary embedding of packed sequences cuts a slice of the frequencies for each sequence, in each layer, for
    queries and for keys: with a thousand short sequences a tenth of the step. One gather gives the same values.

    For megatron-core 0.16.1, rope_utils. Context parallelism, where a rank holds two pieces of a sequence, and
    frequencies that are given for the whole pack stay with Megatron's own.
    """
    rope_utils: Any = import_quietly("megatron.core.models.common.embeddings.rope_utils")
    real = rope_utils._apply_rotary_pos_emb_thd
    # every layer asks for the same pack, for queries and for keys
    last: list[torch.Tensor] = []

    def of_pack(freqs: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        if not last or last[0] is not freqs or last[1] is not cu_seqlens:
            starts, lengths = cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1]
            positions = torch.arange(int(cu_seqlens[-1]), device=freqs.device) - starts.repeat_interleave(lengths)
            last[:] = [freqs, cu_seqlens, freqs[positions]]
        return last[2]

    def apply(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("cp_group")
        if args or group is None or group.size() > 1 or freqs.size(0) == t.size(0):
            return real(t, cu_seqlens, freqs, *args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "cp_group"}
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), of_pack(freqs, cu_seqlens), **rest).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = apply
