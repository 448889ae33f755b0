"""Engines that evaluate and do nothing else: which they are, and what they may be beside the other sections.

Flows in: `evaluation.engines`, the run's spec. Flows out: their numbers, or a refusal that names what to set.
Invariant: what passes leaves an engine to the rollouts, and asks of no engine what only one of theirs could do.
"""

from typing import TYPE_CHECKING

from slimerl.spec.agent import ExternalAgent

if TYPE_CHECKING:
    from slimerl.spec.schema import RunSpec


def evaluation_engines(spec: "RunSpec") -> range:
    """Their numbers: the last of the run's. Engines that are added while the run goes on are none of them."""
    return range(spec.engine.replicas - spec.evaluation.engines, spec.engine.replicas)


def check_evaluation_engines(spec: "RunSpec") -> None:
    """Raises ValueError."""
    count, replicas = spec.evaluation.engines, spec.engine.replicas
    if not count:
        return
    why = f"evaluation.engines = {count}"
    if not spec.evaluation.background:
        raise ValueError(
            f"{why} evaluate while the trainer trains; set evaluation.background: true, or drop evaluation.engines"
        )
    if count >= replicas:
        raise ValueError(
            f"{why} of engine.replicas = {replicas} leaves no engine for rollouts; raise engine.replicas to "
            f"{count + 1}, or lower evaluation.engines"
        )
    if spec.rollout.processes > 1:
        raise ValueError(f"{why}: evaluation engines belong to one rollout process; set rollout.processes: 1")
    if spec.engine.elastic is not None:
        raise ValueError(
            f"{why}: engines that come and go by load are all of the rollouts; drop engine.elastic, or "
            "evaluation.engines"
        )
    if spec.sync.transport == "shards":
        raise ValueError(
            f"{why}: sync.transport: shards sends to all engines at once, and evaluation engines keep their version "
            "while they evaluate; set another transport, or drop evaluation.engines"
        )
    if isinstance(spec.agent, ExternalAgent):
        raise ValueError(
            f"{why}: agent.kind external samples through the gateway, on the engines of the rollouts; drop "
            "evaluation.engines"
        )
