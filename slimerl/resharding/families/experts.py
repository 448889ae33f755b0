"""Blocks of mixture-of-experts layers: router, routed experts, shared experts.

Flows in: sizes read from a config, where the layer hangs. Flows out: blocks of a table.
Invariant: the engine's stacked parameters hold one expert in each slice of their first dimension.
"""

from dataclasses import dataclass

import torch

from slimerl.resharding.families.blocks import DECODER, Site, replicated
from slimerl.resharding.families.cuts import COLUMNS, ROWS, Cut, GateUp
from slimerl.resharding.families.table import Block, Rule, Weight
from slimerl.resharding.layouts import Axis, ExpertLocation


@dataclass(frozen=True)
class ExpertSizes:
    """Of one layer."""

    hidden: int
    experts: int
    """Routed ones."""
    intermediate: int
    """Width of one expert."""
    shared: int = 0
    """Experts that every token passes; they form one MLP of `shared` times the width."""


def router(sizes: ExpertSizes, bias: bool = False, dtype: torch.dtype | None = None, site: Site = DECODER) -> Block:
    """Router, replicated. `bias`: the correction of load balance without loss, in fp32 whatever the model's dtype; on
    Megatron's side a buffer, part of the state dict but no parameter. `dtype`: of the engine's weight, where that is
    another one than the model's."""
    here, core, there = f"{site.checkpoint}mlp.gate.", f"{site.megatron}mlp.router.", f"{site.engine}mlp.gate."
    block = replicated(
        f"{here}weight",
        (sizes.experts, sizes.hidden),
        f"{core}weight",
        engine=f"{there}weight",
        dtype=dtype,
        widened=dtype is not None,
    )
    if bias:
        name = "e_score_correction_bias"
        block += replicated(
            here + name, (sizes.experts,), f"{core}expert_bias", engine=there + name, dtype=torch.float32
        )
    return block


def routed_experts(sizes: ExpertSizes, location: ExpertLocation, site: Site = DECODER) -> Block:
    """Gated experts. SGLang stacks the rank's: w13 is [gate; up] of each, w2 its down-projection."""
    here, core, there = f"{site.checkpoint}mlp.experts.", f"{site.megatron}mlp.experts.", f"{site.engine}mlp.experts."
    gate, up, down = (f"{here}{{expert}}.{kind}_proj.weight" for kind in ("gate", "up", "down"))
    count, wide = sizes.experts, (sizes.intermediate, sizes.hidden)

    def of_megatron(sources: tuple[str, ...], name: str) -> Rule:
        local, grouped = f"{core}local_experts.{{expert}}.{name}.weight", f"{core}{name}.weight{{expert}}"
        cut = ROWS if len(sources) == 2 else COLUMNS
        return Rule(local, sources, cut, Axis.EXPERT, grouped, experts=count)

    def of_engine(sources: tuple[str, ...], name: str) -> Rule:
        cut = GateUp() if len(sources) == 2 else COLUMNS
        return Rule(there + name, sources, cut, Axis.EXPERT, experts=count, stacked=True, location=location)

    return Block(
        weights=(
            Weight(gate, wide, experts=count, quantised=True),
            Weight(up, wide, experts=count, quantised=True),
            Weight(down, wide[::-1], experts=count, quantised=True),
        ),
        megatron=(of_megatron((gate, up), "linear_fc1"), of_megatron((down,), "linear_fc2")),
        engine=(of_engine((gate, up), "w13_weight"), of_engine((down,), "w2_weight")),
    )


def shared_experts(sizes: ExpertSizes, location: ExpertLocation, site: Site = DECODER) -> Block:
    """The MLP of the shared experts; nothing where there are none. An engine may fuse a single one with the routed."""
    if not sizes.shared:
        return Block()
    here, core, there = (f"{base}mlp.shared_experts." for base in (site.checkpoint, site.megatron, site.engine))
    gate, up, down = (f"{here}{kind}_proj.weight" for kind in ("gate", "up", "down"))
    wide = (sizes.shared * sizes.intermediate, sizes.hidden)

    def behind_routed(sources: tuple[str, ...], name: str, cut: Cut) -> Rule | None:
        if sizes.shared > 1:
            return None
        parameter, count = f"{site.engine}mlp.experts.{name}", sizes.experts
        return Rule(parameter, sources, cut, Axis.EXPERT, experts=count, stacked=True, behind=True, location=location)

    return Block(
        weights=(
            Weight(gate, wide, quantised=True),
            Weight(up, wide, quantised=True),
            Weight(down, wide[::-1], quantised=True),
        ),
        megatron=(
            Rule(f"{core}linear_fc1.weight", (gate, up), ROWS, Axis.SHARED),
            Rule(f"{core}linear_fc2.weight", (down,), COLUMNS, Axis.SHARED),
        ),
        engine=(
            Rule(
                f"{there}gate_up_proj.weight",
                (gate, up),
                ROWS,
                Axis.SHARED,
                fused=behind_routed((gate, up), "w13_weight", GateUp()),
            ),
            Rule(
                f"{there}down_proj.weight",
                (down,),
                COLUMNS,
                Axis.SHARED,
                fused=behind_routed((down,), "w2_weight", COLUMNS),
            ),
        ),
    )


def moe_layer(
    sizes: ExpertSizes,
    location: ExpertLocation,
    bias: bool,
    router_dtype: torch.dtype | None = None,
    site: Site = DECODER,
) -> Block:
    """Router, routed and shared experts, in the checkpoint's order."""
    return (
        router(sizes, bias, router_dtype, site)
        + routed_experts(sizes, location, site)
        + shared_experts(sizes, location, site)
    )
