"""Random steps for the tests of this room, in float64: unequal responses with tool tokens, unequal groups."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from slimerl.algorithms import BatchTotals, StepTokens, TokenBatch, ValueBatch

FULL = ("policy", "proximal", "behavior", "reference", "teacher", "entropy", "values", "old_values", "returns")


@dataclass
class Step:
    """Samples with their whole responses: `sampled[i][t]` says which tokens count, and every list of lists
    `policy[i][t]`, … has an entry for each response token, also for those that do not count."""

    rewards: list[float]
    groups: list[str]
    sampled: list[list[bool]]
    policy: list[list[float]] = field(default_factory=list)
    proximal: list[list[float]] = field(default_factory=list)
    behavior: list[list[float]] = field(default_factory=list)
    reference: list[list[float]] = field(default_factory=list)
    teacher: list[list[float]] = field(default_factory=list)
    entropy: list[list[float]] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    old_values: list[list[float]] = field(default_factory=list)
    returns: list[list[float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rewards)

    def part(self, indices: Sequence[int]) -> "Step":
        return Step(**{each.name: [getattr(self, each.name)[i] for i in indices] for each in fields(self)})

    def flat(self, name: str) -> list[float]:
        """The entries of the tokens that count, sample after sample."""
        rows = zip(getattr(self, name), self.sampled, strict=True)
        return [value for row, mask in rows for value, counts in zip(row, mask, strict=True) if counts]

    @property
    def lengths(self) -> list[int]:
        return [sum(mask) for mask in self.sampled]

    @property
    def sequence(self) -> torch.Tensor:
        return torch.tensor([i for i, length in enumerate(self.lengths) for _ in range(length)], dtype=torch.int64)

    @property
    def totals(self) -> BatchTotals:
        return BatchTotals(sum(self.lengths), len(self), len(set(self.groups)))

    def over_tokens(self, of_samples: Sequence[float]) -> list[float]:
        return [value for value, length in zip(of_samples, self.lengths, strict=True) for _ in range(length)]


def random_step(seed: int, samples: int = 11, pairs: bool = False, spread: float = 0.6) -> Step:
    """`spread`: how far the policies are apart, in nats. With `pairs` samples 2k and 2k + 1 are of one group."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 7) for _ in range(samples)]
    sampled = [[draw.random() < 0.7 for _ in range(length)] for length in lengths]
    for mask in sampled:
        mask[draw.randrange(len(mask))] = True
    groups = [f"g{i // 2}" if pairs else draw.choice(["g0", "g1", "g1", "g2", "g3"]) for i in range(samples)]
    step = Step([draw.choice([0.0, 1.0, draw.gauss(0, 1)]) for _ in range(samples)], groups, sampled)
    step.proximal = [[-3 * draw.random() for _ in range(length)] for length in lengths]
    for name in ("policy", "behavior", "reference", "teacher"):
        setattr(step, name, [[value + draw.gauss(0, spread) for value in row] for row in step.proximal])
    for name in ("entropy", "values", "old_values", "returns"):
        setattr(step, name, [[draw.gauss(0, 1) for _ in range(length)] for length in lengths])
    return step


def vector(values: Sequence[float], gradient: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=gradient)


def token_batch(step: Step, advantages: Sequence[float], totals: BatchTotals | None = None) -> TokenBatch:
    """All of the step as one micro-batch; `advantages` one per counting token; `totals`: default the step's own."""
    return TokenBatch(
        policy_logprobs=vector(step.flat("policy"), gradient=True),
        proximal_logprobs=vector(step.flat("proximal")),
        behavior_logprobs=vector(step.flat("behavior")),
        advantages=vector(advantages),
        sequence=step.sequence,
        sequences=len(step),
        totals=totals or step.totals,
        reference_logprobs=vector(step.flat("reference")),
        teacher_logprobs=vector(step.flat("teacher")),
        entropy=vector(step.flat("entropy"), gradient=True),
    )


def value_batch(step: Step, totals: BatchTotals | None = None, margins: torch.Tensor | None = None) -> ValueBatch:
    return ValueBatch(
        values=vector(step.flat("values"), gradient=True),
        old_values=vector(step.flat("old_values")),
        returns=vector(step.flat("returns")),
        sequence=step.sequence,
        sequences=len(step),
        totals=totals or step.totals,
        margins=margins,
    )


def step_tokens(step: Step, outcomes: Sequence[float]) -> StepTokens:
    return StepTokens(
        outcomes=vector(outcomes),
        sequence=step.sequence,
        sequences=len(step),
        proximal_logprobs=vector(step.flat("proximal")),
        reference_logprobs=vector(step.flat("reference")),
        values=vector(step.flat("values")),
    )


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Zeros where an input plays no part."""
    found: tuple[Any, ...] = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
