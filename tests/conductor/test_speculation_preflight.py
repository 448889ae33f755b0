"""Speculative generation against machine and model, before anything starts."""

from typing import Any

import pytest

from slimerl.conductor.preflight.model import serving_faults
from slimerl.conductor.preflight.speculation import speculation_faults
from slimerl.spec import RunSpec
from slimerl.spec.load import spec_from_tree

PLAIN: dict[str, Any] = {"vocab_size": 64}
WITH_LAYER = PLAIN | {"num_nextn_predict_layers": 1}
MTP = {"method": "mtp", "frozen": True}


def spec(tier: str = "off", **engine: Any) -> RunSpec:
    tree = {
        "name": "test",
        "model": {"path": "model"},
        "data": {"train_path": "train.jsonl"},
        "training": {"steps": 1, "prompts_per_step": 8},
        "rollout": {"speculation": {"tier": tier}},
        "engine": engine,
    }
    return spec_from_tree(tree, "spec")


@pytest.mark.parametrize(
    ("made", "config", "cuda", "said"),
    [
        (spec("coupled"), PLAIN, True, "choose exact or lenient"),
        (spec(drafting=MTP), WITH_LAYER, False, "on GPUs alone"),
        (spec(drafting=MTP), PLAIN, True, "num_nextn_predict_layers"),
        (spec(drafting={"method": "mtp"}), WITH_LAYER, True, "set engine.drafting.frozen: true"),
    ],
)
def test_s3_what_machine_or_model_cannot_do_is_refused_with_the_way_out(
    made: RunSpec, config: dict[str, Any], cuda: bool, said: str
):
    (fault,) = speculation_faults(made, config, cuda)
    assert said in fault


def test_what_they_can_do_passes():
    assert not list(speculation_faults(spec("coupled"), PLAIN, cuda=False))
    assert not list(speculation_faults(spec("exact"), PLAIN, cuda=True))
    assert not list(speculation_faults(spec(drafting=MTP), WITH_LAYER, cuda=True))


def test_s3_drafting_past_the_spec_is_refused():
    made = spec(extra_args=["--speculative-algorithm=NEXTN"])
    assert any("set engine.drafting instead" in fault for fault in serving_faults(made, 4096))
