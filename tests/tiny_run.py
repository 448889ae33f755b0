"""A whole run small enough for a test: a random model, a few prompts, two trainer ranks, one engine."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
import yaml
from tiny_models import make_tiny_model

from slimerl.resilience.deadline import Deadline
from slimerl.telemetry import read_records

RUN_S = 150.0


def write_spec(directory: Path, **sections: dict[str, Any]) -> Path:
    """Model, data and spec in `directory`; `sections` are merged over the defaults."""
    model = directory / "base"
    if not model.exists():
        make_tiny_model("qwen3", model, tied=True)
        # One digit: short enough that a random model says some of them by chance, and there is something to learn.
        rows = [{"id": f"p{n}", "prompt": f"{n}=", "answer": str(n), "response": str(n)} for n in range(10)]
        (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "name": "tiny",
        "output_dir": str(directory / "run"),
        "model": {"path": str(model)},
        "data": {
            "train_path": str(directory / "data.jsonl"),
            "eval_path": str(directory / "data.jsonl"),
            "max_prompt_tokens": 16,
        },
        "training": {"steps": 2, "prompts_per_step": 8, "parallel": {"data": 2}, "optimizer": {"lr": 1e-3}},
        "rollout": {"samples_per_prompt": 8, "max_new_tokens": 24},
        "engine": {"context_tokens": 256, "threads": 1},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    spec = directory / "spec.yaml"
    spec.write_text(yaml.safe_dump(tree))
    return spec


@dataclass
class Run:
    """`slimerl run` as a user starts it."""

    spec: Path
    process: subprocess.Popen[str]
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    shared_memory: set[str] = field(default_factory=set)

    @property
    def directory(self) -> Path:
        return self.spec.parent / "run"

    def tree(self) -> list[psutil.Process]:
        """Every process of the run that is alive now."""
        try:
            alive = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen.update((process.pid, process) for process in alive)
        return alive

    def note_shared_memory(self) -> None:
        """What processes of the run have mapped now must not outlive them."""
        for process in self.tree():
            with suppress(psutil.Error, OSError):
                paths = [region.path for region in process.memory_maps()]
                self.shared_memory |= {path for path in paths if path.startswith("/dev/shm/")}

    def find(self, text: str) -> psutil.Process:
        """The first process of the run whose command line contains `text`."""
        return next(process for process in self.tree() if text in " ".join(process.cmdline()))

    def until_step(self, step: int) -> None:
        """Wait until metrics of `step` are recorded."""

        def reached() -> bool:
            self.tree()
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended:\n{self.process.stdout.read() if self.process.stdout else ''}")
            return any(record["step"] >= step for record in read_records(self.directory / "metrics.jsonl"))

        Deadline(f"step {step}", RUN_S).wait_until(reached)
        self.note_shared_memory()

    def finish(self, within_s: float = RUN_S) -> tuple[int, str]:
        """Exit code and output."""
        self.tree()
        output, _ = self.process.communicate(timeout=within_s)
        return self.process.returncode, output

    def left_behind(self) -> list[str]:
        """Command lines of processes that were part of the run and still run, and shared memory that they had."""
        processes = [
            " ".join(process.cmdline())
            for process in self.seen.values()
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]
        return processes + [path for path in sorted(self.shared_memory) if Path(path).exists()]


def start(spec: Path, *overrides: str, keep_record: bool = False, fresh: bool = True) -> Run:
    """Start it; what an earlier run in the same directory recorded goes first, lest it be taken for this one's.

    Args:
        fresh: replace an earlier run; otherwise go on with it.
    """
    if not keep_record:
        (spec.parent / "run" / "metrics.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "slimerl.cli", "run", str(spec), *(["--fresh"] if fresh else []), *overrides]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
        preexec_fn=_heed_interrupts,
    )
    return Run(spec, process)


def teach_digits(model_path: Path) -> None:
    """Some steps of plain training, after which the model answers with one digit, a tenth of the time the right one:
    there is a gradient in every step of a run."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    texts = [f"{asked}={said}" for asked in range(10) for said in range(10)]
    rows = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
    model.save_pretrained(model_path)


def _heed_interrupts() -> None:
    """A shell lets its background jobs, and all that they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt(run: Run) -> None:
    """What Ctrl-C does."""
    run.process.send_signal(signal.SIGINT)
