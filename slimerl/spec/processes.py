"""What several rollout processes need. Flows in: a spec. Flows out: a refusal that names what to set. Invariant: what
passes leaves no process without an engine, and asks of none what the first alone could do."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimerl.spec.schema import RunSpec


def check_processes(spec: "RunSpec") -> None:
    """Raises ValueError."""
    count = spec.rollout.processes
    if count == 1:
        return
    why = f"rollout.processes = {count}"
    if not spec.uses_engines:
        raise ValueError(f"{why}: {spec.algorithm.name} takes its responses from the data; set rollout.processes: 1")
    if spec.engine.replicas < count:
        raise ValueError(
            f"{why} leaves some without an engine: engine.replicas = {spec.engine.replicas}; raise it to {count}, or "
            f"set rollout.processes: {spec.engine.replicas}"
        )
    if spec.engine.elastic is not None and spec.engine.elastic.min < count:
        raise ValueError(
            f"{why}: with engine.elastic.min = {spec.engine.elastic.min} some could be left without an engine; "
            f"raise it to {count}, or set rollout.processes: 1"
        )
    if spec.rollout.speculation.is_on:
        raise ValueError(f"{why}: drafts are kept by one process; set rollout.speculation.tier: off, or processes: 1")
    if spec.rollout.port:
        raise ValueError(f"{why} cannot all listen on rollout.port = {spec.rollout.port}; set it to 0")
