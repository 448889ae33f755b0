"""Tokens by the sample that they belong to: lengths, sums, means and padded rows.

Flows in: flat [tokens] tensors and the sample of each token. Flows out: [sequences] tensors, or the same spread over
the tokens again. Invariant: a sample's result depends on its own tokens alone.
"""

from dataclasses import dataclass

import torch

from slimerl.algorithms.terms import StepTokens, TokenBatch, ValueBatch, required


@dataclass(frozen=True)
class Sequences:
    """Which token belongs to which sample: `of` [tokens] ascending sample indices below `count`.

    Example: of [0, 0, 1], count 2: `lengths` [2, 1], `places` [0, 1, 0], `ends` [1, 2].
    """

    of: torch.Tensor
    count: int

    def __post_init__(self) -> None:
        if len(self.of) and ((self.of.diff() < 0).any() or self.of[0] < 0 or self.of[-1] >= self.count):
            raise ValueError(
                f"the samples of the tokens must be ascending indices below sequences = {self.count}, found "
                f"{self.of.tolist()[:20]} …"
            )

    @property
    def lengths(self) -> torch.Tensor:
        """[sequences], tokens of each."""
        return torch.bincount(self.of, minlength=self.count)

    @property
    def ends(self) -> torch.Tensor:
        """[sequences], where the last token of each stands. Raises ValueError for a sample without tokens."""
        lengths = self.lengths
        if (lengths == 0).any():
            raise ValueError(f"sample {int(lengths.argmin())} of the micro-batch has no token: it has no last one")
        return lengths.cumsum(0) - 1

    @property
    def places(self) -> torch.Tensor:
        """[tokens], the place of each within its sample, from 0."""
        lengths = self.lengths
        return torch.arange(len(self.of), device=self.of.device) - (lengths.cumsum(0) - lengths)[self.of]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[tokens] → [sequences]."""
        return values.new_zeros(self.count).index_add(0, self.of, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """[tokens] → [sequences]; 0 for a sample without tokens."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[sequences] → [tokens]."""
        return values[self.of]

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """[tokens] → [sequences, longest], filled up with zeros."""
        longest = int(self.lengths.max()) if len(self.of) else 0
        rows = values.new_zeros(self.count, longest)
        return rows.index_put((self.of, self.places), values)

    def tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """[sequences, longest] → [tokens]: the reverse of `rows`."""
        return rows[self.of, self.places]


def sequences_of(batch: TokenBatch | ValueBatch | StepTokens, asked_by: str) -> Sequences:
    """Raises MissingInput: the batch does not say which token belongs to which sample."""
    return Sequences(required(batch.sequence, "sequence", asked_by), batch.sequences)
