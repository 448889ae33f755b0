"""The terms that all algorithms share: what they are given, and what they give back.

Invariant: every tensor [tokens] has one entry per *sampled* token of whole samples, in the samples' order; prompt,
tool and padding tokens have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


class MissingInput(ValueError):
    """An algorithm was not given what its formula needs; the message names it."""


@dataclass(frozen=True)
class BatchTotals:
    """What one optimizer update is taken over, on all ranks together.

    Args:
        tokens: sampled tokens; the number by which the trainer divides the gradient.
        sequences: samples.
        groups: groups (prompts); in preference data the pairs.
    """

    tokens: int
    sequences: int
    groups: int


@dataclass(frozen=True)
class TokenBatch:
    """The sampled tokens of one micro-batch; all tensors [tokens] of one float type, if not said otherwise.

    Three policies, never to be confused:
        behavior: what the engine reported while sampling.
        proximal: the trainer's own log-probabilities with the weights at the start of the step.
        policy: the trainer's, inside the loss, with gradient.

    Further inputs, where `Needs` asks for them:
        sequence: int64, the sample of each token, counted within the micro-batch, ascending.
        sequences: number of samples of the micro-batch, each with at least one token.
        totals: of the minibatch that the micro-batch is a part of.
        reference_logprobs: of the frozen reference model.
        teacher_logprobs: of the teacher.
        entropy: in nats, of the policy; with gradient where an entropy bonus is asked for.
        versions_behind: policy versions between the sampling of a token and the start of the step.
    """

    policy_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence: torch.Tensor | None = None
    sequences: int = 0
    totals: BatchTotals | None = None
    reference_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    versions_behind: torch.Tensor | None = None


@dataclass(frozen=True)
class ValueBatch:
    """The sampled tokens of one micro-batch of a model that gives values (critic) or scores (reward model).

    Args:
        values: [tokens], with gradient. V_t is the value before token t is sampled.
        old_values: [tokens], of the critic at the start of the step.
        returns: [tokens], what the values should be.
        sequence, sequences, totals: as in `TokenBatch`.
        margins: [pairs], by how much the chosen answer should lead.
    """

    values: torch.Tensor
    old_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    sequence: torch.Tensor | None = None
    sequences: int = 0
    totals: BatchTotals | None = None
    margins: torch.Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """`per_token` [tokens]: the loss of each token, with gradient. Summed over a minibatch and divided by its number of
    tokens it is the loss of the formula, whatever that averages over.

    `means`: further [tokens] tensors, to be reported as means over all tokens of the step; `maxima` as maxima.
    """

    per_token: torch.Tensor
    means: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTokens:
    """Sampled tokens before training, for advantages that differ from token to token; no gradients.

    Args:
        outcomes: [sequences], from `Algorithm.outcomes`.
        sequence, sequences: as in `TokenBatch`.
        proximal_logprobs, reference_logprobs: [tokens].
        values: [tokens], of the critic. V_t is the value before token t is sampled.
    """

    outcomes: torch.Tensor
    sequence: torch.Tensor
    sequences: int
    proximal_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenAdvantages:
    """`advantages` [tokens], not yet whitened; `returns` [tokens] for the critic; `means` as in `LossTerms`."""

    advantages: torch.Tensor
    returns: torch.Tensor | None = None
    means: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Needs:
    """What an algorithm with its options must be given beyond log-probabilities and sample advantages.

    Args:
        sequences: `sequence`, `sequences` and `totals` of the batch.
        proximal: proximal log-probabilities before `token_advantages`.
        reference: reference log-probabilities.
        teacher: teacher log-probabilities.
        entropy_gradient: the entropy with gradient.
        token_advantages: call `outcomes`, `token_advantages`, and, with `whitening`, `returns.whiten` over the
            moments of all ranks; not `advantages`.
        whitening: see `token_advantages`.
        critic: values, and a critic trained by `value_loss`.
        lengths: response lengths for `outcomes` and `advantages`.
        pairs: samples 2k and 2k + 1 of a micro-batch are the chosen and the rejected answer of a pair.
        scores: the model gives scores, trained by `value_loss`; there is no policy.
    """

    sequences: bool = False
    proximal: bool = False
    reference: bool = False
    teacher: bool = False
    entropy_gradient: bool = False
    token_advantages: bool = False
    whitening: bool = False
    critic: bool = False
    lengths: bool = False
    pairs: bool = False
    scores: bool = False


Scores = tuple[list[float], dict[str, float]]
"""One number per sample, in order, and figures to report."""


class Algorithm(Protocol):
    """One algorithm with its settings."""

    @property
    def needs(self) -> Needs: ...

    def advantages(
        self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None
    ) -> Scores:
        """One advantage per sample of a whole step, and figures to report.

        Args:
            rewards: one per sample.
            groups: the samples' group ids.
            lengths: response tokens of the samples.

        Raises:
            MissingInput: the advantages differ from token to token (`needs.token_advantages`), or lengths are needed.
        """
        ...

    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        """What `token_advantages` starts from, one per sample of a whole step; otherwise the advantages."""
        ...

    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        """Advantages of this rank's tokens. Samples may be split over calls in any way. Raises MissingInput."""
        ...

    def loss(self, tokens: TokenBatch) -> LossTerms:
        """The policy's loss of one micro-batch. Raises MissingInput."""
        ...

    def value_loss(self, tokens: ValueBatch) -> LossTerms:
        """The critic's or reward model's loss of one micro-batch. Raises MissingInput, also where there is neither."""
        ...

    def trains_policy(self, step: int) -> bool:
        """False while a critic is warmed up first (steps count from 1)."""
        ...


def required(tensor: torch.Tensor | None, name: str, asked_by: str) -> torch.Tensor:
    """The tensor, or MissingInput naming it."""
    if tensor is None:
        raise MissingInput(f"{asked_by} needs {name}, which the batch does not carry; see the algorithm's `needs`")
    return tensor


def required_totals(totals: BatchTotals | None, asked_by: str) -> BatchTotals:
    """The totals, or MissingInput."""
    if totals is None:
        raise MissingInput(
            f"{asked_by} averages over the samples of the whole minibatch and needs totals, which the batch does not "
            "carry; a mean over the micro-batch would depend on the split"
        )
    return totals
