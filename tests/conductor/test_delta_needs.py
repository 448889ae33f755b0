"""What `sync.transport: delta` asks of a machine is told before the run."""

import pytest

from slimerl.conductor.derived import layout_rows
from slimerl.conductor.estimate import estimate
from slimerl.conductor.preflight import machine
from slimerl.conductor.reach import lasting_faults
from slimerl.spec import load_spec
from slimerl.training.capabilities import Capabilities
from slimerl.training.memory_estimate import GIB
from slimerl.training.model_config import read_config


def needs(home, *overrides):
    spec, config = load_spec(home / "spec.yaml", overrides), read_config(home / "model")
    return spec, config, estimate(spec, config, Capabilities(cuda=False))


def test_s3_the_state_that_was_sent_last_counts_as_memory_of_the_host(home):
    """It is the model once, and three buckets (here one holds the whole model) while an engine gets everything."""
    _, _, plain = needs(home)
    spec, config, delta = needs(home, "sync.transport=delta")
    assert plain.sent_state == 0
    assert delta.sent_state == 4 * delta.sync_bytes
    assert delta.host - delta.sent_state == plain.host - plain.shared_memory
    assert "MiB of host memory kept for it" in dict(layout_rows(spec, config, delta))["weight sync"]
    [line] = machine.sent_state_faults(delta, delta.sent_state - 1)
    assert line.startswith("sync.transport = delta keeps 0.0 GiB in host memory")
    assert not list(machine.sent_state_faults(delta, delta.sent_state))
    assert not list(machine.sent_state_faults(plain, GIB))


@pytest.mark.parametrize(
    ("transport", "placement", "refused"),
    [("delta", "colocated", True), ("delta", "disaggregated", False), ("ipc", "colocated", False)],
)
def test_s3_engines_that_give_their_weights_up_at_every_step_get_no_deltas(home, transport, placement, refused):
    """Injected: a machine with GPUs, on which engines and trainer take turns."""
    spec, _, _ = needs(home, f"sync.transport={transport}", f"cluster.placement={placement}")
    lines = list(lasting_faults(spec))
    assert bool(lines) == refused
    assert all("cluster.placement: disaggregated" in line for line in lines)
