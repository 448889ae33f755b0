"""Patch of the optimizers: an Adam of the shape that Megatron's distributed optimizer saves and loads."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam

from megatron_patches.device import without_import_warnings
from megatron_patches.registry import cpu_patch


class GroupStepAdam(torch.optim.Optimizer):
    """Adam with apex's FusedAdam's interface: one `step` for each parameter group, none for each parameter."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            group["step"] = group.get("step", 0) + 1
            for p in params:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state = [self.state[p] for p in params]
            adam(
                params,
                [p.grad for p in params],
                [s["exp_avg"] for s in state],
                [s["exp_avg_sq"] for s in state],
                [],
                # torch's kernel counts the step up itself, so each parameter gets a number of its own
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )


@cpu_patch
def adam_with_one_step_per_group() -> None:
    """Without apex and Transformer Engine the optimizers take torch's AdamW, whose state (a "step" for each
    parameter, none before the first step) the distributed optimizer fails to load.

    For megatron-core 0.16.1; torch's fused CPU kernel does the arithmetic.
    """
    with without_import_warnings():
        from megatron.core import optimizer
        from megatron.core.optimizer import distrib_optimizer
    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    distrib_optimizer.USING_TE_OPTIMIZER = False
