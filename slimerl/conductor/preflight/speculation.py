"""Speculative generation against the machine and the model. Flows in: the spec, `config.json`. Flows out: faults."""

from collections.abc import Iterator, Mapping
from typing import Any

from slimerl.spec import RunSpec


def speculation_faults(spec: RunSpec, config: Mapping[str, Any], cuda: bool) -> Iterator[str]:
    if spec.rollout.speculation.tier == "coupled" and cuda:
        yield (
            "rollout.speculation.tier coupled: the rollout has to know the noise of the engines' draws, and on GPUs it "
            "is SGLang's own; choose exact or lenient"
        )
    drafting = spec.engine.drafting
    if drafting is None:
        return
    if not drafting.frozen:
        yield (
            f"engine.drafting.method {drafting.method}: the trainer trains no draft, so that no weight sync carries "
            "its weights; set engine.drafting.frozen: true to draft with those of the checkpoint"
        )
    if not cuda:
        yield "engine.drafting: SGLang drafts on GPUs alone; remove it"
    if drafting.method == "mtp" and not config.get("num_nextn_predict_layers"):
        yield (
            "engine.drafting.method mtp: the model has no multi-token-prediction layer (config.json: "
            "num_nextn_predict_layers); choose eagle or eagle3 with a draft model, or remove engine.drafting"
        )
