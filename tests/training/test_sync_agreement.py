"""After a sync, Hugging Face, Megatron and the engine compute the same, and the engine's digests are the trainer's."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from tiny_models import make_tiny_model

from slimerl.engine.protocol import SamplingParams
from slimerl.samples.messages import EngineInfo, HoldReply, HoldRequest, ReleaseRequest
from slimerl.spec.schema import ParallelSpec, SyncSpec

PROMPT = [10, 20, 30, 40, 50]
VERSION = 7


@dataclass
class Desk:
    """The rollout role's side of a sync: hands out one engine and keeps what it is told."""

    engine: EngineInfo
    released: list[ReleaseRequest] = field(default_factory=list)

    def hold(self, request: HoldRequest) -> HoldReply:
        return HoldReply("lease", [self.engine])

    def release(self, request: ReleaseRequest) -> None:
        self.released.append(request)


def sync_from_megatron(
    model_path: Path, parallel: ParallelSpec, engine: EngineInfo, run_dir: Path, transport: str = "ipc"
) -> Any:
    """On every rank: load the model into Megatron, sync it to the engine; rank 0 returns what it released."""
    from engine_fixtures import engine_spec

    from slimerl.training.weight_sync import build_syncer

    built = tiny.build(model_path, parallel)
    desk = Desk(engine) if built.grid.is_first else None
    spec = engine_spec(model_path, run_dir, engine.tensor_parallel)
    training = spec.training.model_copy(update={"parallel": parallel})
    sync = SyncSpec(transport=transport, bucket_mib=1)
    spec = spec.model_copy(update={"training": training, "sync": sync})
    syncer = build_syncer(spec, built.chunks, built.map, built.grid, desk)
    phases = syncer.sync(VERSION)
    return (desk.released, phases) if desk else None


def megatron_logprobs(model_path: Path, parallel: ParallelSpec, tokens: list[int]) -> torch.Tensor:
    """Log-probability of each token after its predecessors, [len(tokens) - 1]."""
    import torch.distributed as dist

    built = tiny.build(model_path, parallel)
    padding = -len(tokens) % parallel.tensor
    packed = tiny.plain_pack([len(tokens), padding] if padding else [len(tokens)])
    with torch.no_grad():
        ids = torch.tensor([[*tokens, *[0] * padding]])
        logits = built.chunks[0].eval()(ids, None, None, packed_seq_params=packed)[0].contiguous()
    parts = [torch.empty_like(logits) for _ in range(parallel.tensor)]
    dist.all_gather(parts, logits)
    logprobs = torch.cat(parts, dim=-1)[: len(tokens) - 1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


CASES = {
    "qwen3, trainer TP2, engine TP1": ("qwen3", False, 2, 1),
    "tied llama, trainer TP1, engine TP2": ("llama", True, 1, 2),
    "tied llama, trainer TP2, engine TP2": ("llama", True, 2, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_after_a_sync_three_implementations_agree(ranks, engines, tmp_path, case):
    family, tied, trainer_size, engine_size = CASES[case]
    engine = engines(family, tied=tied, tensor_parallel=engine_size)
    parallel = ParallelSpec(tensor=trainer_size)
    trained = make_tiny_model(family, tmp_path / "trained", seed=11 + trainer_size, tied=tied)

    released, phases = ranks.run(trainer_size, sync_from_megatron, trained, parallel, engine.info, tmp_path)[0]
    # Whole means: the digests of every rank's live parameters were those of what the trainer sent.
    assert released == [ReleaseRequest("lease", VERSION, [engine.info.engine_id], {})]
    assert {"hold", "gather", "send", "digest", "verify", "commit", "release"} <= phases.keys()

    generated = engine.ask(lambda client: client.generate(PROMPT, SamplingParams(24, temperature=0.0)))
    assert set(generated.versions) == {VERSION}
    tokens = [*PROMPT, *generated.tokens]
    hf = transformers.AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = hf(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    megatron = ranks.run(trainer_size, megatron_logprobs, trained, parallel, tokens)[0]
    assert (megatron - expected).abs().max() <= 1e-4
    assert (torch.tensor(generated.logprobs) - expected[len(PROMPT) - 1 :]).abs().max() <= 1e-4


def test_a_tied_model_spread_over_stages_arrives_whole(ranks, engines, tmp_path):
    """The ranks that hold the model once gather it, whatever the grid; the digests prove it on each engine rank."""
    parallel = ParallelSpec(pipeline=2, data=2)
    trained = make_tiny_model("llama", tmp_path / "trained", seed=21, tied=True)
    engine = engines("llama", tied=True, tensor_parallel=2)
    arguments = trained, parallel, engine.info, tmp_path, "disk"
    released, _ = ranks.run(parallel.world_size, sync_from_megatron, *arguments)[0]
    assert released == [ReleaseRequest("lease", VERSION, [engine.info.engine_id], {})]
    generated = engine.ask(lambda client: client.generate(PROMPT, SamplingParams(24, temperature=0.0)))
    hf = transformers.AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = hf(torch.tensor([[*PROMPT, *generated.tokens]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(generated.tokens)[:, None])[:, 0]
    assert (torch.tensor(generated.logprobs) - expected).abs().max() <= 1e-4
