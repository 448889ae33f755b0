"""Memory that trainer and engines hand to each other really leaves the process that gives it."""

import sys
from pathlib import Path

import pytest
import torch
from gpu_process import in_process, needs_gpus, needs_library

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))

import tiny
from machine_steps import Variant, prepare

from slimerl.engine.protocol import MemoryTag, SamplingParams
from slimerl.spec.schema import ParallelSpec

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

GIB = 2**30
ROOMY = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "head_dim": 64}
"""0.16 · 10⁹ parameters: 18 bytes each are 2.7 GiB."""


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def round_of_turns(model_path: Path) -> tuple[int, int, int, int]:
    """(bytes said to be freed, freed by the device's own count, lacking after the return, weights changed)."""
    from slimerl.training.hand_over import HandOver, TrainerParts, share_problems

    machine = prepare(model_path, ParallelSpec(), Variant("bf16"))
    machine.trainer.step(machine.packs(0))
    torch.cuda.empty_cache()
    parameters = list(machine.built.chunks[0].parameters())
    before = [parameter.detach().cpu().clone() for parameter in parameters]
    hand_over = HandOver(TrainerParts(machine.trainer.chunks, machine.optimizer), None, share_problems)
    start = free_bytes()
    said = hand_over.begin_sync() + hand_over.begin_generation()
    given = free_bytes() - start
    hand_over.begin_training()
    lacking = free_bytes() - start
    changed = sum(not torch.equal(p.detach().cpu(), old) for p, old in zip(parameters, before, strict=True))
    machine.trainer.step(machine.packs(1))
    return said, given, lacking, changed


def test_a_trainer_frees_gigabytes_and_takes_them_back(tmp_path: Path, record_property) -> None:
    tiny.write_model(tmp_path, "qwen3", **ROOMY)
    said, given, lacking, changed = in_process(round_of_turns, tmp_path, gpu=True)
    record_property("GiB that a trainer of 0.16e9 parameters hands over", round(given / GIB, 2))
    assert said > GIB
    assert given > 0.8 * said
    assert abs(lacking) < 0.1 * said
    assert changed == 0


@needs_library("torch_memory_saver", "comes with sglang's own dependencies (requirements-gpu.txt)")
def test_an_engine_frees_its_kv_cache_and_serves_again(tmp_path: Path, record_property) -> None:
    import asyncio

    from engine_fixtures import START_S, engine_spec
    from tiny_models import make_tiny_model

    from slimerl.engine.launcher import Device, start_server
    from slimerl.resilience.deadline import Deadline

    model = make_tiny_model("qwen3", tmp_path / "model")
    # 2 layers, 2 heads of 32 elements, keys and values, 4 bytes: 1 KiB a token
    spec = engine_spec(model, tmp_path / "run", max_total_tokens=2 * 2**20)
    server = start_server(spec, 0, Device.CUDA)
    try:
        asyncio.run(server.wait_until_healthy(Deadline("the engine to start", START_S)))

        async def turn() -> tuple[int, int]:
            async with server.client(timeout_s=60) as client:
                start = free_bytes()
                await client.release_memory([MemoryTag.KV_CACHE])
                freed = free_bytes() - start
                await client.resume_memory([MemoryTag.KV_CACHE])
                await client.continue_generation()
                answer = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=4))
                return freed, len(answer.tokens)

        freed, tokens = asyncio.run(turn())
    finally:
        server.stop()
    record_property("GiB of KV cache that an engine hands over", round(freed / GIB, 2))
    assert freed > GIB
    assert tokens > 0
