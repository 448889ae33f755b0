"""The memory estimate: exact where it counts parameters, near what was measured where it estimates, and fast."""

import json
import time
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from slimerl.resharding.families import BlockScales, Form, family_of
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.training.memory_estimate import (
    GIB,
    checkpoint_bytes,
    engine_memory,
    export_bytes,
    trainer_memory,
    with_critic,
)

MODELS = Path(__file__).parents[2] / "configs" / "models"
LARGE = sorted(path.stem for path in MODELS.glob("*.json"))
BF16, FP32 = torch.bfloat16, torch.float32


def model(name):
    return json.loads((MODELS / f"{name}.json").read_text())


@pytest.mark.parametrize(("dtype", "measured_gib"), [(BF16, 4.9), (FP32, 6.4)])
def test_s3_the_estimate_is_near_what_a_trainer_rank_was_measured_to_take(dtype, measured_gib):
    """SmolLM2-135M over two data-parallel ranks, micro-batches of 1,024 tokens: resident memory of a rank."""
    estimated = trainer_memory(model("smollm2_135m"), MegatronLayout(data=2), dtype, 1024).total / GIB
    assert measured_gib / 1.5 < estimated < measured_gib * 1.5


def test_one_rank_holds_the_parameters_that_transformers_counts():
    tiny = tiny_model("qwen3", tied=True)
    config = tiny.config.to_dict()
    parameters = sum(parameter.numel() for parameter in tiny.parameters())
    assert trainer_memory(config, MegatronLayout(), FP32, 1).parameters == parameters
    assert engine_memory(config, EngineLayout(), FP32, 1, 1, 1).parameters == parameters
    assert export_bytes(config, FP32) == parameters * 4


def test_weights_gradients_and_optimizer_take_megatrons_bytes_per_parameter():
    """18 bytes in bfloat16 and 16 in float32 on one rank; 6 + 12/d and 8 + 8/d on d (Megatron's documentation)."""
    config = model("qwen3_8b")
    for dtype, whole, kept, spread in ((BF16, 18, 6, 12), (FP32, 16, 8, 8)):
        for data in (1, 4):
            memory = trainer_memory(config, MegatronLayout(data=data), dtype, 1)
            per_parameter = (memory.weights + memory.gradients + memory.optimizer) / memory.parameters
            assert per_parameter == pytest.approx(kept + spread / data)
        assert checkpoint_bytes(config, dtype) == memory.parameters * (whole - 4)


def test_a_reference_model_takes_its_weights_once_in_host_memory():
    config, layout = model("qwen3_8b"), MegatronLayout(pipeline=2)
    for cuda in (False, True):
        without = trainer_memory(config, layout, BF16, 1, cuda=cuda)
        memory = trainer_memory(config, layout, BF16, 1, cuda=cuda, reference=True)
        assert memory.total - without.total == (0 if cuda else memory.parameters * 2)


def test_context_parallel_ranks_share_the_optimizers_state_too():
    config = model("qwen3_8b")
    data, both = (
        trainer_memory(config, layout, BF16, 1)
        for layout in (MegatronLayout(data=4), MegatronLayout(data=2, context=2))
    )
    assert data.optimizer == both.optimizer


def test_experts_are_spread_over_other_ranks_than_the_rest():
    """8 ranks, experts over 4 of them: their optimizer state has 2 places, that of the rest 8."""
    config = model("qwen3_30b_a3b")
    layout = MegatronLayout(data=8, expert=4)
    memory = trainer_memory(config, layout, BF16, 1)
    experts = 48 * (128 // 4) * 3 * 2048 * 768
    dense = memory.parameters - experts
    assert memory.optimizer == pytest.approx(12 * (experts / 2 + dense / 8))


def test_tensor_parallel_ranks_hold_shares_that_add_up_to_the_model():
    config = model("qwen3_8b")
    whole = trainer_memory(config, MegatronLayout(), BF16, 4096, fused=True)
    half = trainer_memory(config, MegatronLayout(tensor=2), BF16, 4096, sequence_parallel=True, fused=True)
    assert half.parameters == pytest.approx(whole.parameters / 2, rel=1e-3)
    assert half.activations == pytest.approx(whole.activations / 2, rel=0.01)


def test_activations_are_those_of_the_formula_of_the_literature():
    """Korthikanti et al. 2022, equation 2: s·b·h·34 bytes a layer for a model with an MLP of 4h and 16 bits, of which
    three dropout masks and the MLP's first dropout are not here and the gate is; without the attention matrix."""
    hidden, heads, tokens = 4096, 32, 1000
    config = model("qwen3_8b") | {"num_key_value_heads": heads, "intermediate_size": 4 * hidden, "num_hidden_layers": 1}
    found = trainer_memory(config, MegatronLayout(), BF16, tokens, fused=True).activations / (tokens * hidden * 2)
    # inputs and outputs of qkv (1 + 3), proj (1 + 1), gate and up (1 + 8), down (4 + 1), and of two norms
    assert found == pytest.approx(22, rel=0.01)


def test_earlier_pipeline_stages_hold_more_micro_batches():
    config = model("qwen3_8b") | {"tie_word_embeddings": True}
    whole = trainer_memory(config, MegatronLayout(), BF16, 4096)
    staged = trainer_memory(config, MegatronLayout(pipeline=4), BF16, 4096)
    assert staged.stage == 0
    assert staged.activations == pytest.approx(whole.activations, rel=1e-3)
    interleaved = trainer_memory(config, MegatronLayout(pipeline=4, virtual=3), BF16, 4096)
    assert interleaved.activations == pytest.approx(whole.activations * (1 + 3 / (4 * 3)), rel=1e-3)


def test_recomputing_whole_layers_keeps_their_inputs_alone():
    config = model("qwen3_8b")
    kept = trainer_memory(config, MegatronLayout(), BF16, 8192, fused=True).activations
    recomputed = trainer_memory(config, MegatronLayout(), BF16, 8192, fused=True, recompute="full").activations
    assert recomputed == pytest.approx(36 * 8192 * 4096 * 2 + kept / 36)


def test_an_engine_caches_keys_and_values_or_one_latent_vector():
    def cache(name, tensor, tokens=1000):
        return engine_memory(model(name), EngineLayout(tensor=tensor), BF16, tokens, 1, 1).kv_cache / tokens / 2

    assert cache("qwen3_8b", 1) == 36 * 2 * 8 * 128
    assert cache("qwen3_8b", 4) == 36 * 2 * 2 * 128
    # with more ranks than KV heads each rank has one
    assert cache("qwen3_235b_a22b", 8) == 94 * 2 * 128
    assert cache("deepseek_v3_671b", 8) == 61 * (512 + 64)


def test_latent_attention_keeps_its_up_projection_a_second_time():
    memory = engine_memory(model("deepseek_v3_671b"), EngineLayout(tensor=8), BF16, 1, 1, 1)
    assert memory.weights - memory.parameters * 2 == 61 * (128 // 8) * (128 + 128) * 512 * 2


@pytest.mark.parametrize("name", LARGE)
def test_s3_every_large_model_is_estimated_within_three_seconds(name):
    config = model(name)
    started = time.process_time()
    trainer = trainer_memory(config, MegatronLayout(), BF16, 8192)
    engine = engine_memory(config, EngineLayout(), BF16, 100_000, 256, 8192)
    assert time.process_time() - started < 3
    parameters = sum(tensor.numel for tensor in family_of(config).logical_tensors(config))
    assert trainer.parameters == engine.parameters == parameters
    assert trainer.total > parameters * 18


def test_an_engine_in_fp8_holds_a_byte_for_each_weight_that_has_a_scale():
    """Against the tensors themselves, one by one; latent attention's second copy of kv_b_proj stays wide."""
    form = Form(scales=BlockScales(16))
    config = tiny_model("deepseek_v3").config.to_dict()
    held = family_of(config).logical_tensors(config, torch.bfloat16, form)
    copies = sum(2 * tensor.numel for tensor in held if tensor.name.endswith("kv_b_proj.weight"))
    narrow = sum(tensor.dtype == torch.float32 and "scale" not in tensor.name for tensor in held)
    assert narrow == 1, "the correction bias of the only layer with experts"
    biases = sum(2 * tensor.numel for tensor in held if tensor.name.endswith("correction_bias"))
    rows = EngineLayout().padded_vocabulary(config["vocab_size"])
    assert rows == config["vocab_size"]
    found = engine_memory(config, EngineLayout(), torch.bfloat16, 1, 1, 1, form=form)
    assert found.weights == sum(tensor.nbytes for tensor in held) + copies - biases
    assert found.parameters == engine_memory(config, EngineLayout(), torch.bfloat16, 1, 1, 1).parameters


def test_a_critic_takes_weights_gradients_and_optimizer_of_its_own_and_no_logits():
    config, layout = model("qwen3_8b"), MegatronLayout(data=2)
    policy = trainer_memory(config, layout, BF16, 1024)
    critic = trainer_memory(config, layout, BF16, 1024, form=Form(score=True))
    head = config["vocab_size"] * config["hidden_size"]
    assert critic.parameters == policy.parameters - head + config["hidden_size"]
    assert critic.logits == 0
    both = with_critic(policy, critic)
    assert both.total - policy.total == critic.parameters * (6 + 12 // 2)
