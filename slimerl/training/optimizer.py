"""Megatron's distributed optimizer and learning-rate schedule, from the spec.

The schedule counts training steps: step i of n (from 1) uses the schedule's value at i, and decay ends at n + 1, so
that neither the first step of a warm-up nor the last of a decay is spent at a rate of zero.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slimerl.spec.schema import OptimizerSpec
from slimerl.training.fused_adam import fuse_torch_adam
from slimerl.training.machine_arguments import optimizer_arguments


def build_optimizer(spec: OptimizerSpec, chunks: Sequence[torch.nn.Module], dtype: torch.dtype) -> Any:
    """Adam whose state is spread over the data-parallel ranks; build it after the weights are loaded."""
    optimizer = get_megatron_optimizer(optimizer_config(spec, dtype), list(chunks))
    fuse_torch_adam(optimizer)
    return optimizer


def optimizer_config(spec: OptimizerSpec, dtype: torch.dtype) -> OptimizerConfig:
    """Megatron's configuration of the optimizer; `dtype` is the model's."""
    return OptimizerConfig(
        lr=spec.lr,
        min_lr=spec.min_lr,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.beta1,
        adam_beta2=spec.beta2,
        adam_eps=spec.eps,
        clip_grad=spec.clip_grad_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        **optimizer_arguments(),
    )


def build_schedule(spec: OptimizerSpec, steps: int, optimizer: Any) -> OptimizerParamScheduler:
    """Call `step(1)` before each training step.

    Raises:
        ValueError: the warm-up is as long as the run, or the minimum is above the rate.
    """
    if spec.warmup_steps > steps:
        raise ValueError(f"training.optimizer.warmup_steps = {spec.warmup_steps} exceeds training.steps = {steps}")
    if spec.min_lr > spec.lr:
        raise ValueError(f"training.optimizer.min_lr = {spec.min_lr} exceeds training.optimizer.lr = {spec.lr}")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=spec.lr,
        min_lr=spec.min_lr,
        lr_warmup_steps=spec.warmup_steps,
        lr_decay_steps=steps + 1,
        lr_decay_style=spec.decay,
        start_wd=spec.weight_decay,
        end_wd=spec.weight_decay,
        wd_incr_steps=steps + 1,
        wd_incr_style="constant",
    )
