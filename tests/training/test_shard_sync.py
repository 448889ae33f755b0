"""The `shards` transport: every trainer rank sends its own part to the engine ranks that want it, and the real engine
then computes what Megatron and transformers compute; the digests of all its ranks are those of what was sent."""

import pytest
import torch
import transformers
from shard_syncs import change, changed_logprobs, sync_shards
from tiny_models import make_tiny_model

from slimerl.engine.protocol import SamplingParams
from slimerl.samples.messages import ReleaseRequest
from slimerl.spec.schema import ParallelSpec

PROMPT = [10, 20, 30, 40, 50]
LAYERS = 4
"""Dense ones and such with experts."""


def generated_by(engine):
    return engine.ask(lambda client: client.generate(PROMPT, SamplingParams(16, temperature=0.0)))


def logprobs_of(checkpoint, tokens):
    """Of transformers' model with the weights as `shard_syncs.change` leaves them."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    change([hf])
    with torch.no_grad():
        logprobs = hf(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


GRIDS = {
    "EP2×DP2, unstaged": (ParallelSpec(data=4, expert=2), False, 1),
    "EP2×TP1, staged": (ParallelSpec(data=2, expert=2), True, 1),
}
"""Grid, into a staging buffer, GPUs of a node. On one node two engines share what comes in; on nodes of one GPU they
relay it to each other."""
ENGINES = {
    ("deepseek_v3", 1): ["EP2×DP2, unstaged", "EP2×TP1, staged"],
}


@pytest.mark.parametrize("kind", ENGINES, ids=lambda kind: f"{kind[0]}, engines of {kind[1]}")
def test_both_engines_compute_what_the_trainer_does(ranks, engines, tmp_path, kind):
    """Two syncs from each grid, the second, by what is known by then, of other weights."""
    family = kind[0]
    with engines.brief(kind, kind, num_hidden_layers=LAYERS) as pair:
        infos = [engine.info for engine in pair]
        names = [info.engine_id for info in infos]
        for seed, grid in enumerate(ENGINES[kind], start=41):
            parallel, staged, per_node = GRIDS[grid]
            trained = make_tiny_model(family, tmp_path / grid, seed=seed, num_hidden_layers=LAYERS)
            versions = [10 * seed, 10 * seed + 1]
            arguments = trained, parallel, infos, tmp_path, staged, versions, per_node
            released, phases = ranks.run(parallel.world_size, sync_shards, *arguments)[0]
            assert released == [ReleaseRequest("lease", version, names, {}) for version in versions]
            assert phases[1]["plan"] < phases[0]["plan"], "nothing is planned again"
            for engine in pair:
                generated = generated_by(engine)
                assert set(generated.versions) == {versions[-1]}
                tokens, own = [*PROMPT, *generated.tokens], torch.tensor(generated.logprobs)
                assert (own - logprobs_of(trained, tokens)[len(PROMPT) - 1 :]).abs().max() <= 1e-4
            megatron = ranks.run(1, changed_logprobs, trained, tokens)[0]
            assert (own - megatron[len(PROMPT) - 1 :]).abs().max() <= 1e-4
