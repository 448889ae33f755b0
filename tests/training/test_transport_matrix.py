"""Trainers of four ranks, engines of one rank and of two, two of them at once, by every transport: the same weights."""

import pytest
import torch
import transformers
from shard_syncs import change, changed_logprobs, sync_by_each
from tiny_models import make_tiny_model

from slimerl.engine.protocol import SamplingParams
from slimerl.samples.messages import ReleaseRequest
from slimerl.spec.schema import ParallelSpec

PROMPT = [10, 20, 30, 40, 50]
LAYERS = 4
"""One for each chunk of PP2×VPP2."""
TRANSPORTS = [(name, False) for name in ("ipc", "broadcast", "disk", "delta", "shards")] + [("shards", True)]
"""Name, and whether into a staging buffer."""
SYNCS = 9
"""One by each, and another by those that keep something of the first."""
GRIDS = {
    "qwen3": {"TP2×PP2": ParallelSpec(tensor=2, pipeline=2), "PP2×VPP2": ParallelSpec(pipeline=2, virtual=2)},
    "qwen3_moe": {
        "TP2×EP2": ParallelSpec(tensor=2, data=2, expert=2, sequence_parallel=True),
        "EP2×DP2": ParallelSpec(data=4, expert=2),
    },
}


def logprobs_by_transformers(checkpoint, tokens, changes):
    hf = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for _ in range(changes):
        change([hf])
    with torch.no_grad():
        logprobs = hf(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("size", [1, 2], ids=["engines of 1", "engines of 2"])
@pytest.mark.parametrize("family", GRIDS)
def test_every_transport_brings_every_grid_to_both_engines(ranks, engines, tmp_path, family, size):
    """Released as whole means that the digests of each engine rank's live parameters were those of what was sent. Each
    transport comes last once in a while, and what the engines then compute is compared with two other programs."""
    with engines.brief((family, size), (family, size), num_hidden_layers=LAYERS) as pair:
        infos = [engine.info for engine in pair]
        names = [info.engine_id for info in infos]
        for number, (grid, parallel) in enumerate(GRIDS[family].items(), start=2 * size):
            turned = TRANSPORTS[number:] + TRANSPORTS[:number]
            trained = make_tiny_model(family, tmp_path / grid, seed=number, num_hidden_layers=LAYERS)
            first, changes = 100 * number, SYNCS
            arguments = trained, parallel, infos, tmp_path, turned, first
            released = ranks.run(parallel.world_size, sync_by_each, *arguments)[0]
            versions = range(first, first + changes)
            assert released == [ReleaseRequest("lease", version, names, {}) for version in versions]
            for engine in pair:
                generated = engine.ask(lambda client: client.generate(PROMPT, SamplingParams(16, temperature=0.0)))
                assert set(generated.versions) == {versions[-1]}
                tokens, own = [*PROMPT, *generated.tokens], torch.tensor(generated.logprobs)
                expected = logprobs_by_transformers(trained, tokens, changes)[len(PROMPT) - 1 :]
                assert (own - expected).abs().max() <= 1e-4
            megatron = ranks.run(1, changed_logprobs, trained, tokens, changes)[0]
            assert (own - megatron[len(PROMPT) - 1 :]).abs().max() <= 1e-4
