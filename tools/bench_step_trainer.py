"""The trainer alone, for `bench_step.py --trainer-only`: the real loop and source on samples that are made up.

    torchrun … tools/bench_step_trainer.py SPEC PROMPT_TOKENS RESPONSE_TOKENS

Flows in: the spec. Flows out: the record and trace of a run in its directory. Every step has the same samples.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

import megatron_patches
from slimerl.resilience.kernel_caches import bounded_kernel_caches
from slimerl.resilience.processes import die_with_parent
from slimerl.rollout.statistics import GroupRecord, batch_metrics
from slimerl.samples.messages import BatchManifest, SampleMeta, SamplePayload, pack_array
from slimerl.spec import RunSpec, load_spec
from slimerl.telemetry import RunLog, trace
from slimerl.telemetry.resources import ResourceMeter, collect
from slimerl.training.memory import keep_freed_memory
from slimerl.training.rollout_client import RolloutClient


class MadeUpSamples:
    """Stands where the client of the rollout role stands; the same samples on every rank and in every step.

    Args of the constructor:
        prompt_tokens, response_tokens: mean lengths; each is drawn between half and one and a half of it.
    """

    def __init__(self, spec: RunSpec, vocabulary: int, prompt_tokens: int, response_tokens: int) -> None:
        random = np.random.default_rng(spec.seed)
        self._payloads: dict[str, SamplePayload] = {}
        self._metas: list[SampleMeta] = []
        longest = spec.engine.context_tokens
        for group in range(spec.training.prompts_per_step):
            prompt = random.integers(0, vocabulary, min(_drawn(random, prompt_tokens), longest - 1))
            for number in range(spec.rollout.samples_per_prompt):
                length = min(_drawn(random, response_tokens), longest - len(prompt))
                response = random.integers(0, vocabulary, length)
                self._add(f"{group}/{number}", str(group), prompt, response, reward=float(number % 2))

    def _add(self, sample_id: str, group: str, prompt: np.ndarray, response: np.ndarray, reward: float) -> None:
        length = len(response)
        self._metas.append(
            SampleMeta(sample_id, group, len(prompt), length, length, 0, 0, reward, reward > 0, finish_reason="stop")
        )
        self._payloads[sample_id] = SamplePayload(
            sample_id,
            len(prompt),
            tokens=pack_array([*prompt, *response], "int32"),
            sampled=pack_array([1] * length, "uint8"),
            behavior_logprobs=pack_array([-1.0] * length, "float32"),
            versions=pack_array([0] * length, "int32"),
        )

    def next_batch(self, step: int, timeout_s: float) -> BatchManifest:
        metrics = batch_metrics(self._metas, [GroupRecord()], {}, version=0)
        return BatchManifest(f"step-{step}", step, self._metas, metrics)

    def fetch(self, sample_ids: Sequence[str], shards: Sequence[int] = ()) -> list[SamplePayload]:
        return [self._payloads[sample_id] for sample_id in sample_ids]

    def trained(self, batch_id: str, version: int) -> None:
        """Nobody waits for it."""


def _drawn(random: np.random.Generator, mean: int) -> int:
    return max(1, int(random.integers(mean // 2, mean + mean // 2 + 1)))


def main(spec: RunSpec, prompt_tokens: int, response_tokens: int) -> None:
    """One rank."""
    from slimerl.training import assembly, parallel
    from slimerl.training.capabilities import detect
    from slimerl.training.clock import SilentLog
    from slimerl.training.loop import NoEngines, Run, train

    capabilities = detect()
    device = capabilities.device(int(os.environ["LOCAL_RANK"]))
    if capabilities.cuda:
        torch.cuda.set_device(device)
    grid = parallel.start(spec.training.parallel, capabilities, device, spec.deadlines.batch_s, spec.seed)
    trace.start(spec.run_dir, f"trainer-{grid.rank}")
    policy = assembly.build_policy(spec, grid, capabilities)
    samples = MadeUpSamples(spec, policy.arguments.vocab_size, prompt_tokens, response_tokens)
    # the syncer is left aside: there is no engine
    source, _ = assembly.with_engines(spec, policy, cast(RolloutClient, samples) if grid.is_leader else None)
    log = RunLog(spec.run_dir) if grid.is_first else SilentLog()
    resources = partial(_resources, spec.run_dir, ResourceMeter(spec.run_dir, f"trainer-{grid.rank}"))
    train(Run(spec, policy.trainer, source, NoEngines(), log, export=lambda: None, resources=resources))
    parallel.stop()


def _resources(run_dir: Path, meter: ResourceMeter) -> dict[str, float]:
    meter.publish()
    return collect(run_dir)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    wanted = load_spec(Path(sys.argv[1]))
    torch.set_num_threads(wanted.training.threads_per_rank)
    if not torch.cuda.is_available():
        keep_freed_memory()
        os.environ.update(bounded_kernel_caches())
    megatron_patches.apply()
    main(wanted, int(sys.argv[2]), int(sys.argv[3]))
