"""Checkpoint → Megatron's parameters on every rank → checkpoint, at every size, for every family: no bit is lost."""

import itertools
from typing import Any

import pytest
import torch
from resharding_models import State, assert_same, filled, random_state
from sparse_models import DEEPSEEK, GLM, KIMI

from slimerl.resharding.assemble import collect
from slimerl.resharding.coverage import owned_placements
from slimerl.resharding.families import FAMILIES, Form, family_of
from slimerl.resharding.layouts import MegatronLayout

SIZES = (1, 2, 4)
DENSE: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
SMALL = {"hidden_size": 16, "n_routed_experts": 4}
CONFIGS = {
    **{name: DENSE | {"model_type": name} for name in ("llama", "qwen2", "qwen3")},
    **{
        f"{name}, tied": DENSE | {"model_type": name, "tie_word_embeddings": True}
        for name in ("llama", "qwen2", "qwen3")
    },
    "qwen3_moe": DENSE | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8},
    "glm4_moe": GLM | SMALL,
    "deepseek_v3": DEEPSEEK | SMALL,
    "deepseek_v3, no query latent": DEEPSEEK | SMALL | {"q_lora_rank": None},
    "kimi_k2": KIMI | SMALL | {"num_nextn_predict_layers": 1},
}
"""With 2 KV heads, four trainer ranks share a group of queries."""


def test_every_family_is_here():
    assert {config["model_type"] for config in CONFIGS.values()} == FAMILIES.keys()


def layouts(config: dict[str, Any], tensor: int, pipeline: int, expert: int) -> list[MegatronLayout]:
    """Experts cut over as many ranks as the rest, and not at all; equal, uneven and virtual stages."""
    experts_inside = sorted({1, tensor}) if "moe_intermediate_size" in config else [tensor]
    uneven = {1: ((4,),), 2: ((3, 1),), 4: ((2, 1, 1, 0),)}[pipeline]
    found = []
    for inside in experts_inside:
        sizes = {"tensor": tensor, "pipeline": pipeline, "expert": expert, "expert_tensor": inside}
        sizes["data"] = max(1, expert * inside // tensor)
        found += [MegatronLayout(**sizes), MegatronLayout(**sizes, stage_layers=uneven)]
        if pipeline == 2:
            found.append(MegatronLayout(**sizes, virtual=2))
    return found


@pytest.mark.parametrize(("tensor", "pipeline", "expert"), list(itertools.product(SIZES, SIZES, SIZES)))
@pytest.mark.parametrize("name", CONFIGS)
def test_w10_checkpoint_to_megatron_and_back_is_bit_exact_at_every_size(name, tensor, pipeline, expert):
    """Fault: a part written back where another lay, or a tensor that no rank owns at some size: the prediction layer,
    a tied head, the final norm where the last stage has no layer."""
    config = CONFIGS[name]
    if expert > 1 and "moe_intermediate_size" not in config:
        return
    form = Form(prediction=bool(config.get("num_nextn_predict_layers")))
    state = random_state(config, form)
    assert form.prediction == any(key.startswith("model.layers.4.") for key in state)
    for layout in layouts(config, tensor, pipeline, expert):
        assert_same(there_and_back(config, layout, form, state), state)


def there_and_back(config: dict[str, Any], layout: MegatronLayout, form: Form, state: State) -> State:
    """The checkpoint that the owners of all ranks' parameters write."""
    family = family_of(config)
    tensors = family.logical_tensors(config, form=form)
    ranks = [family.megatron_placements(config, layout, rank, form) for rank in range(layout.world_size)]
    back = {tensor.name: torch.full(tensor.shape, -1.0).to(tensor.dtype) for tensor in tensors}
    for placements, owned in zip(ranks, owned_placements(ranks, tensors), strict=True):
        if owned:
            collect(owned, filled(placements, state), back)
    return back
