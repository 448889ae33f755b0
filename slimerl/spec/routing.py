"""What `algorithm.routing_replay` may be beside the other sections. Flows in: the run's spec. Flows out: a refusal that
names what to set. Invariant: what passes is replayed, and a record is what sampled the tokens behind it."""

from typing import TYPE_CHECKING

from slimerl.spec.agent import ExternalAgent

if TYPE_CHECKING:
    from slimerl.spec.schema import RunSpec


def check_routing_replay(spec: "RunSpec") -> None:
    """Raises ValueError: nothing would be replayed, or not what was chosen."""
    replay, rollout = spec.algorithm.routing_replay, spec.rollout
    name = f"algorithm.routing_replay: {replay}"
    if replay == "r2" and spec.training.minibatches_per_step == 1:
        raise ValueError(
            f"{name} keeps the routing of the step's first pass over its updates, and with "
            "training.minibatches_per_step = 1 no update comes between; raise it, or choose r3"
        )
    if replay != "r3":
        return
    if rollout.on_update == "retract" and rollout.max_staleness > 0:
        raise ValueError(
            f"{name}: with rollout.on_update: retract an engine computes begun samples again under new weights, and "
            "reports that routing in place of the one that sampled them; set rollout.on_update: abort (or in_place, or "
            "drain)"
        )
    if spec.shares_gpus and rollout.max_staleness > 0:
        raise ValueError(
            f"{name}: with cluster.placement: colocated engines give up what they have begun for every training step, "
            "and compute it again; set rollout.max_staleness: 0, or cluster.placement: disaggregated"
        )
    if rollout.speculation.is_on:
        raise ValueError(f"{name}: tokens kept from drafts have no record; set rollout.speculation.tier: off")
    if any(argument.startswith("--enable-hierarchical") for argument in spec.engine.extra_args):
        raise ValueError(
            f"{name}: SGLang keeps its record by place in the KV cache, and what a hierarchical cache brings back has "
            "another token's; remove --enable-hierarchical-cache from engine.extra_args"
        )
    if spec.engine.drafting is not None:
        raise ValueError(f"{name}: SGLang records no tokens that it drafts by itself; drop engine.drafting")
    if isinstance(spec.agent, ExternalAgent):
        raise ValueError(f"{name}: turns of agent.kind external are kept without a record; set routing_replay to r2")
