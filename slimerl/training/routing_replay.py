"""Routing replay: the policy's routers take recorded experts instead of choosing, through Megatron's `RouterReplay`.

Flows in: the policy's model chunks, the record of each micro-batch. Flows out: forward and backward passes whose tokens
go to the recorded experts; the experts' weights are the router's own, so that it keeps its gradient.
Invariants: a router belongs to one chunk and one layer, counted over the whole model; what a backward pass computes
again is routed as the forward pass was, in the order in which Megatron's schedules take micro-batches, which is the
same forward and backward for each chunk; outside of the policy's passes every router chooses for itself.

Megatron's own switch, `moe_enable_routing_replay`, makes one list of the routers of the process, whatever model they
are of, and knows no token without a record. Here the routers of the policy alone are given a `RouterReplay`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from slimerl.spec.algorithm import RoutingReplay as Mode
from slimerl.training.routing_record import RoutingRecord

RECORD, FORWARD, BACKWARD = (
    RouterReplayAction.RECORD,
    RouterReplayAction.REPLAY_FORWARD,
    RouterReplayAction.REPLAY_BACKWARD,
)


class LayerReplay(RouterReplay):
    """Of one router. `layer`: counted from 0 over the whole model, dense layers included."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        # the list of the process: nothing here goes by it, and what stands in it is never freed
        self.global_router_replay_instances.remove(self)
        self.layer = layer
        self.wanted: torch.Tensor | None = None

    def want(self, experts: torch.Tensor | None) -> None:
        """Of the next forward pass: [tokens, experts per token], below 0 where the router chooses; None: everywhere."""
        self.wanted = experts
        self.set_router_replay_action(FORWARD)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Megatron's, and what was not recorded is completed; the completed choice is what is computed again."""
        if self.router_replay_action is FORWARD and default_compute_topk is not None:
            own = default_compute_topk(scores, topk, num_groups, group_topk)[1]
            self.set_target_indices(own if self.wanted is None else self._completed(self.wanted, own))
        values, experts = super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        if self.router_replay_action is RECORD:
            # Megatron keeps it for other passes alone; this one may be computed again, too
            self.replay_backward_list.append(experts)
        return values, experts

    def _completed(self, wanted: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        if wanted.shape != own.shape:
            raise RoutingMisplaced(
                f"layer {self.layer}: the record has {tuple(wanted.shape)} experts, the router has {tuple(own.shape)} "
                "to give; the record is one of another pack"
            )
        wanted = wanted.to(own.device, own.dtype, non_blocking=True)
        return torch.where(wanted < 0, own, wanted)


class RoutingMisplaced(RuntimeError):
    """A record does not fit the tokens that it is to be replayed for."""


class RoutingReplay:
    """Of the policy on this rank. Without chunks, or with mode `none`, it does nothing."""

    def __init__(self, chunks: Sequence[torch.nn.Module] = (), mode: Mode = "none") -> None:
        """Give the chunks' routers what they replay by.

        Raises:
            RoutingMisplaced: a router uses Transformer Engine's fused kernel, which replays nothing and says nothing.
        """
        self._mode = mode
        self._paused = False
        self._replays: dict[int, list[LayerReplay]] = {}
        self._part, self._parts, self._recomputed = 0, 1, False
        for chunk in chunks if mode != "none" else ():
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            self._replays[id(chunk)] = [self._attach(router) for router in routers]

    @property
    def of_engine(self) -> bool:
        """What is replayed is the engine's choice."""
        return self._mode == "r3"

    def _attach(self, router: TopKRouter) -> LayerReplay:
        if router.config.moe_router_fusion:
            raise RoutingMisplaced("moe_router_fusion is on: its kernel ignores a recorded routing; build without it")
        if router.config.sequence_parallel:
            self._part, self._parts = router.tp_group.rank(), router.tp_group.size()
        # of what the spec offers to be computed again, whole layers alone have their router in it
        self._recomputed = router.config.recompute_granularity == "full"
        router.router_replay = LayerReplay(router.layer_number - 1)
        return router.router_replay

    @contextmanager
    def forward(self, chunk: torch.nn.Module, record: RoutingRecord) -> Iterator[None]:
        """Around the forward pass of one micro-batch through one chunk."""
        replays = [] if self._paused else self._replays.get(id(chunk), [])
        for each in replays:
            known = record.of_first_pass.get(each.layer)
            if self._mode == "r2" and known is None:
                each.set_router_replay_action(RECORD)
            else:
                each.want(known if self._mode == "r2" else record.engine_choice(each.layer, self._part, self._parts))
        yield
        for each in replays:
            if each.router_replay_action is RECORD:
                record.of_first_pass[each.layer] = each.get_recorded_indices().to(torch.int16)
            if not (self._recomputed and torch.is_grad_enabled()):
                each.replay_backward_list.clear()
            # whatever runs a router from here to the next forward pass computes again for a backward pass
            each.set_router_replay_action(BACKWARD)

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """Around all micro-batches of a pass: nothing is kept behind it."""
        try:
            yield
        finally:
            for each in (each for replays in self._replays.values() for each in replays):
                each.clear_indices()
                each.wanted = None
                each.clear_router_replay_action()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the chunks hold another model's weights, and their routers choose for themselves."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
