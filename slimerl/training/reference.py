"""The frozen reference model: the policy's weights of an earlier moment, which change places with the present ones
while its log-probabilities are computed.

Flows in: the model chunks of this rank, wrapped for training. Flows out: the same chunks, holding the reference's
weights for a while. Invariants: after a turn every weight is what it was before, bit for bit; float32 master weights
and the optimizer's state are never read or written; nothing is trained, synced or saved during a turn.

    POLICY --exchange--> REFERENCE --exchange--> POLICY

An exchange is a copy through one tensor's worth of memory, so that one set of weights in host memory is all it takes,
and every parallelism is the policy's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import torch

from slimerl.telemetry import trace
from slimerl.training.weights import named_parameters


class InPlace(StrEnum):
    """Whose weights the chunks hold."""

    POLICY = "policy"
    REFERENCE = "reference"
    UNKNOWN = "unknown"
    """An exchange failed half-way."""


class ReferenceOutOfTurn(RuntimeError):
    """The chunks do not hold the policy's weights where they must."""


class ReferenceModel:
    """The weights at its making, until they are refreshed; every rank keeps its own part."""

    def __init__(self, chunks: Sequence[torch.nn.Module], refresh_steps: int = 0) -> None:
        """`refresh_steps`: after so many training steps it becomes what the policy is then; 0: never."""
        self._refresh_steps = refresh_steps
        self._in_place = InPlace.POLICY
        self._live = list(named_parameters(chunks).values())
        self._kept = [_in_host_memory(tensor) for tensor in self._live]
        self._copy()

    def refresh(self, done_steps: int) -> None:
        """Take the policy's weights if that is due after `done_steps` steps of the run.

        It follows from the number of steps alone, so that a resumed run needs no copy where a refresh is due.

        Raises:
            ReferenceOutOfTurn: during a turn.
        """
        self._check_policy("be refreshed")
        if self._refresh_steps and done_steps and done_steps % self._refresh_steps == 0:
            self._copy()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The chunks hold the reference's weights inside, and the policy's again behind, whatever happens inside.

        Raises:
            ReferenceOutOfTurn: during another turn, or after an exchange that failed.
        """
        self._check_policy("take its turn")
        self._exchange(InPlace.REFERENCE)
        try:
            yield
        finally:
            self._exchange(InPlace.POLICY)

    def _check_policy(self, what: str) -> None:
        if self._in_place is not InPlace.POLICY:
            raise ReferenceOutOfTurn(
                f"the reference model cannot {what}: the weights in place are {self._in_place}, not the policy's"
            )

    @torch.no_grad()
    def _copy(self) -> None:
        for live, kept in zip(self._live, self._kept, strict=True):
            kept.copy_(live.data)

    @torch.no_grad()
    def _exchange(self, then: InPlace) -> None:
        with trace.span("exchange weights"):
            self._in_place = InPlace.UNKNOWN
            for live, kept in zip(self._live, self._kept, strict=True):
                aside = live.data.clone()
                live.data.copy_(kept)
                kept.copy_(aside)
            self._in_place = then


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
