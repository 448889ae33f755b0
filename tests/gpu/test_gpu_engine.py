"""SGLang on a GPU: the trainer's log-probabilities, and the same answer whatever else is in the batch."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from gpu_process import in_process, needs_gpus

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))

from machine_steps import Variant, prepare

from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.spec.schema import ParallelSpec

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

PROMPT = [7, 42, 9, 300, 11]
NEW_TOKENS = 24
AGREEMENT = 1e-2
"""Mean difference of log-probabilities in float32: the engine's attention kernel multiplies in TF32."""


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW_TOKENS, seed=seed, extra={"ignore_eos": True})


def trainer_logprobs(model_path: Path, tokens: list[int]) -> list[float]:
    import numpy as np

    from slimerl.training.batches import PackForm, pack
    from slimerl.training.training_sample import TrainingSample

    machine = prepare(model_path, ParallelSpec(), Variant())
    count = len(tokens) - len(PROMPT)
    sample = TrainingSample(
        sample_id="s",
        tokens=np.array(tokens, dtype=np.int32),
        prompt_length=len(PROMPT),
        sampled=np.ones(count, dtype=bool),
        behavior_logprobs=np.zeros(count, dtype=np.float32),
        advantage=0.0,
    )
    form = PackForm(segmented=machine.segmented, device=machine.built.grid.device)
    [found] = machine.trainer.logprobs([pack([sample], 1.0, form)])
    return found.float().cpu().tolist()


def test_engine_and_trainer_give_the_same_log_probabilities(engines, record_property) -> None:
    engine = engines("qwen3")
    answer: Generation = engine.ask(lambda client: client.generate(PROMPT, params(1)), timeout_s=60)
    assert len(answer.tokens) == NEW_TOKENS
    wanted = in_process(trainer_logprobs, engine.model_path, [*PROMPT, *answer.tokens], gpu=True)
    difference = (torch.tensor(answer.logprobs) - torch.tensor(wanted)).abs()
    record_property("largest difference of log-probabilities, engine and trainer, fp32", f"{difference.max():.1e}")
    assert difference.mean() < AGREEMENT


def test_the_same_seed_gives_the_same_tokens_and_log_probabilities_in_any_batch(engines) -> None:
    engine = engines("qwen3")

    async def together(client) -> list[Generation]:
        others = [client.generate([*PROMPT, seed], params(seed)) for seed in range(100, 107)]
        return await asyncio.gather(client.generate(PROMPT, params(1)), *others)

    alone: Generation = engine.ask(lambda client: client.generate(PROMPT, params(1)), timeout_s=60)
    again: Generation = engine.ask(lambda client: client.generate(PROMPT, params(1)), timeout_s=60)
    crowded: Generation = engine.ask(together, timeout_s=60)[0]
    assert alone.tokens == again.tokens == crowded.tokens
    assert alone.logprobs == again.logprobs == crowded.logprobs
