"""Roles on several machines against the spec: can they reach each other? Flows in: the spec. Flows out: faults."""

from collections.abc import Iterator

from slimerl.spec import RunSpec


def reach_faults(spec: RunSpec, nodes: int) -> Iterator[str]:
    """Of a run whose roles are on `nodes` machines."""
    if nodes == 1 or not spec.uses_engines:
        return
    shape = f"{spec.gpus} GPUs on nodes of {spec.cluster.gpus_per_node}"
    if spec.sync.transport == "ipc":
        yield (
            f"sync.transport = ipc reaches the engines of one machine, the run has {shape}; set it to broadcast or disk"
        )
    if spec.cluster.network == "loopback":
        yield f"cluster.network = loopback: the roles of {shape} could not reach each other; set it to hostname"


def unwatched_faults(spec: RunSpec) -> Iterator[str]:
    """Of a run whose roles are started one by one, and so without a conductor."""
    if spec.engine.elastic is not None:
        yield (
            "engine.elastic: `slimerl run` adds and removes engines, and here roles are started one by one; drop it "
            "and choose engine.replicas"
        )


def lasting_faults(spec: RunSpec) -> Iterator[str]:
    """Of a run on GPUs: do engines still have their weights at the next sync?"""
    if spec.uses_engines and spec.sync.transport == "delta" and spec.is_colocated:
        yield (
            "sync.transport = delta changes the weights that engines hold, and engines on the trainer's GPUs give them "
            "up at every step; set it to ipc, or cluster.placement: disaggregated"
        )
    if spec.uses_engines and spec.sync.transport == "shards" and spec.is_colocated:
        yield (
            "sync.transport = shards links GPUs, and engines on the trainer's GPUs share them; set it to ipc, or "
            "cluster.placement: disaggregated"
        )
