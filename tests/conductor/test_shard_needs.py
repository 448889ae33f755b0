"""What `sync.transport: shards` asks of a machine is told before the run."""

import pytest

from slimerl.conductor.derived import room_rows
from slimerl.conductor.estimate import estimate
from slimerl.conductor.reach import lasting_faults
from slimerl.spec import load_spec
from slimerl.training.capabilities import Capabilities
from slimerl.training.model_config import read_config

CPU = Capabilities(cuda=False)


def needs(home, *overrides):
    spec, config = load_spec(home / "spec.yaml", overrides), read_config(home / "model")
    return spec, estimate(spec, config, CPU)


def test_s3_the_buffer_in_which_new_weights_are_staged_counts_as_memory_of_each_engine_rank(home):
    _, plain = needs(home)
    spec, staged = needs(home, "sync.transport=shards")
    _, unstaged = needs(home, "sync.transport=shards", "sync.staged=false")
    assert plain.engine.staging == unstaged.engine.staging == 0
    assert staged.engine.staging == staged.engine.weights
    ranks = spec.engine.replicas * spec.engine.tensor_parallel
    assert staged.host - unstaged.host == ranks * staged.engine.weights
    assert "those on their way in" in dict(room_rows(spec, staged, CPU))["memory, engine rank"]


@pytest.mark.parametrize(("placement", "refused"), [("colocated", True), ("disaggregated", False)])
def test_s3_engines_on_the_trainers_gpus_get_no_shards(home, placement, refused):
    """Injected: a machine with GPUs, on which engines and trainer take turns."""
    spec, _ = needs(home, "sync.transport=shards", f"cluster.placement={placement}")
    lines = list(lasting_faults(spec))
    assert bool(lines) == refused
    assert all("set it to ipc, or cluster.placement: disaggregated" in line for line in lines)
