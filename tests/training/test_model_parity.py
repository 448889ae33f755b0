"""The Megatron model computes what the Hugging Face model computes, on every grid."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from slimerl.spec.schema import ParallelSpec

DENSE = {
    "one process": ParallelSpec(),
    "TP2": ParallelSpec(tensor=2),
    "TP2 with sequence parallelism": ParallelSpec(tensor=2, sequence_parallel=True),
}
TIED = {"one process": ParallelSpec(), "TP2": ParallelSpec(tensor=2)}
EXPERTS = {
    "one process": ParallelSpec(),
    "TP2": ParallelSpec(tensor=2, sequence_parallel=True),
    "TP2, experts whole": ParallelSpec(tensor=2, sequence_parallel=True, expert_tensor=1),
    "EP2": ParallelSpec(data=2, expert=2),
    "TP2xEP2": ParallelSpec(tensor=2, sequence_parallel=True, data=2, expert=2),
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, ParallelSpec]]] = {
    "llama": ("llama", {}, DENSE),
    "llama, tied": ("llama", {"tied": True}, TIED),
    "qwen2": ("qwen2", {}, DENSE),
    "qwen2, tied": ("qwen2", {"tied": True}, TIED),
    "qwen3": ("qwen3", {}, DENSE),
    "qwen3, tied": ("qwen3", {"tied": True}, TIED),
    "qwen3_moe": ("qwen3_moe", {}, EXPERTS),
    "qwen3_moe, not normalised": ("qwen3_moe", {"norm_topk_prob": False}, {"one process": ParallelSpec()}),
    "glm4_moe": ("glm4_moe", {}, {name: EXPERTS[name] for name in ("one process", "TP2xEP2")}),
    "deepseek_v3": ("deepseek_v3", {}, EXPERTS),
    "deepseek_v3 without groups, latent queries and yarn": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": None},
        {"one process": ParallelSpec(), "TP2": ParallelSpec(tensor=2, sequence_parallel=True)},
    ),
    "deepseek_v3 with one magnitude of yarn": (
        "deepseek_v3",
        {"rope_parameters": {key: value for key, value in tiny.YARN.items() if not key.startswith("mscale")}},
        {"one process": ParallelSpec()},
    ),
}
LENGTHS = (24, 7, 1, 12)


def sequences() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(0, tiny.VOCABULARY, (length,), generator=random) for length in LENGTHS]


def packed_logprobs(model_path: Path, parallel: ParallelSpec) -> torch.Tensor:
    """Log-probabilities of every next token, for the sequences in one pack: [tokens, vocabulary], put together over
    the tensor-parallel ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    built = tiny.build(model_path, parallel)
    whole = torch.cat(sequences())
    padding = -len(whole) % parallel.tensor
    packed = tiny.plain_pack([*LENGTHS, padding] if padding else LENGTHS)
    with torch.no_grad():
        logits = built.chunks[0].eval()(
            torch.cat([whole, whole.new_zeros(padding)])[None], None, None, packed_seq_params=packed
        )[0]
    parts = [torch.empty_like(logits) for _ in range(parallel.tensor)]
    dist.all_gather(parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)[: len(whole), : tiny.VOCABULARY].log_softmax(-1)


def expected_logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(each[None]).logits[0] for each in sequences()]).log_softmax(-1)


@pytest.mark.parametrize("name", MODELS)
def test_packed_logprobs_equal_those_of_hugging_face(ranks, tmp_path, name):
    kind, changes, grids = MODELS[name]
    expected = expected_logprobs(tiny.write_model(tmp_path, kind, **changes))
    for grid, parallel in grids.items():
        for found in ranks.run(parallel.world_size, packed_logprobs, tmp_path, parallel):
            assert torch.allclose(found, expected, rtol=0, atol=1e-4), f"{grid}: {(found - expected).abs().max()}"


def test_llama3_frequency_scaling_equals_that_of_hugging_face(ranks, tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny.write_model(
        tmp_path, "llama", rope_parameters=rope | {"original_max_position_embeddings": 8192}, hidden_size=128
    )
    [found] = ranks.run(1, packed_logprobs, tmp_path, ParallelSpec())
    expected = expected_logprobs(model)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4), (found - expected).abs().max()
