"""TRL's side of `bench_trl.py`: runs in TRL's environment, which has nothing of slimerl's but its math rule.

    python tools/bench_trl_worker.py JOB      # JSON, see `Job`

Flows out: OUTPUT/steps.json, one object per optimizer step: {"seconds", "mean_length"}.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from slimerl.rewards.math import score
from slimerl.rewards.outcome import RewardRequest, Scored


@dataclass(frozen=True)
class Job:
    """`batch`: samples of one forward and backward pass."""

    model: str
    prompts: str
    output: str
    dtype: str
    steps: int
    samples: int
    samples_per_step: int
    batch: int
    max_new_tokens: int
    learning_rate: float
    threads: int


class StepTimes(TrainerCallback):
    """A step begins where the one before has ended, as on the other side."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.lengths: list[float] = []
        self._since = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._since = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.monotonic()
        self.seconds.append(now - self._since)
        self._since = now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "completions/mean_length" in logs:
            self.lengths.append(logs["completions/mean_length"])


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for a right answer, by the same rule as slimerl's runs."""
    outcomes = [
        score(RewardRequest(str(number), completion[0]["content"], right))
        for number, (completion, right) in enumerate(zip(completions, answer, strict=True))
    ]
    return [outcome.reward if isinstance(outcome, Scored) else 0.0 for outcome in outcomes]


def main(job: Job) -> None:
    torch.set_num_threads(job.threads)
    rows = [json.loads(line) for line in Path(job.prompts).read_text(encoding="utf-8").splitlines()]
    data = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    config = GRPOConfig(
        output_dir=job.output,
        use_cpu=True,
        bf16=job.dtype == "bf16",
        model_init_kwargs={"dtype": {"fp32": "float32", "bf16": "bfloat16"}[job.dtype]},
        gradient_checkpointing=False,
        per_device_train_batch_size=job.batch,
        gradient_accumulation_steps=job.samples_per_step // job.batch,
        num_generations=job.samples,
        max_completion_length=job.max_new_tokens,
        max_steps=job.steps,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        shuffle_dataset=False,
    )
    times = StepTimes()
    trainer = GRPOTrainer(
        model=job.model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(data), callbacks=[times]
    )
    trainer.train()
    steps = [
        {"seconds": seconds, "mean_length": length}
        for seconds, length in zip(times.seconds, times.lengths, strict=True)
    ]
    (Path(job.output) / "steps.json").write_text(json.dumps(steps), encoding="utf-8")


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
