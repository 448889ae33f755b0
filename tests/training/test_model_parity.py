"""The Megatron model computes what the Hugging Face model computes, on every grid."""

from pathlib import Path

import pytest
import tiny
import torch

from slimerl.spec.schema import ParallelSpec

GRIDS = {
    "one process": ParallelSpec(),
    "TP2": ParallelSpec(tensor=2),
    "TP2 with sequence parallelism": ParallelSpec(tensor=2, sequence_parallel=True),
}
KINDS = [("llama", False), ("llama", True), ("qwen3", False), ("qwen3", True)]
LENGTHS = (24, 7, 1, 12)


def sequences() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(0, tiny.VOCABULARY, (length,), generator=random) for length in LENGTHS]


def packed_logits(model_path: Path, parallel: ParallelSpec) -> torch.Tensor:
    """Logits of the sequences in one pack: [tokens, vocabulary], put together over the ranks."""
    import torch.distributed as dist

    from slimerl.training.batches import packed_bounds

    built = tiny.build(model_path, parallel)
    whole = torch.cat(sequences())
    padding = -len(whole) % parallel.tensor
    packed = packed_bounds([*LENGTHS, padding] if padding else LENGTHS, "cpu")
    with torch.no_grad():
        logits = built.chunks[0].eval()(
            torch.cat([whole, whole.new_zeros(padding)])[None], None, None, packed_seq_params=packed
        )[0]
    parts = [torch.empty_like(logits) for _ in range(parallel.tensor)]
    dist.all_gather(parts, logits.contiguous())
    return torch.cat(parts, dim=-1)[: len(whole), : tiny.VOCABULARY]


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_packed_logits_equal_those_of_hugging_face(ranks, tmp_path, kind, tied):
    model = tiny.write_model(tmp_path, kind, tied)
    with torch.no_grad():
        expected = torch.cat([model(each[None]).logits[0] for each in sequences()])
    for name, parallel in GRIDS.items():
        for found in ranks.run(parallel.world_size, packed_logits, tmp_path, parallel):
            assert torch.allclose(found, expected, rtol=0, atol=1e-4), f"{name}: {(found - expected).abs().max()}"


def test_llama3_frequency_scaling_equals_that_of_hugging_face(ranks, tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny.write_model(
        tmp_path, "llama", rope_parameters=rope | {"original_max_position_embeddings": 8192}, hidden_size=128
    )
    with torch.no_grad():
        expected = torch.cat([model(each[None]).logits[0] for each in sequences()])
    [found] = ranks.run(1, packed_logits, tmp_path, ParallelSpec())
    assert torch.allclose(found, expected, rtol=0, atol=1e-4), (found - expected).abs().max()
