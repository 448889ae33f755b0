"""A sample: one prompt and what came after it, token by token.

Invariant: `response_tokens`, `sampled`, `behavior_logprobs` and `versions` always have one entry per response
token; `append` is the only method that lengthens them. Token ids are the truth: text is never re-tokenised.
`routing` has one entry for each of the first tokens, the prompt's included; only `note_routing` lengthens it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from slimerl.samples.messages import SampleMeta, SamplePayload, SavedSample, pack_array, unpack_array


class SampleState(StrEnum):
    """queued → running → (interrupted → running)* → generated → rewarded → ready → trained, or dropped."""

    QUEUED = "queued"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    GENERATED = "generated"
    REWARDED = "rewarded"
    READY = "ready"
    TRAINED = "trained"
    DROPPED = "dropped"


NEXT_STATES: dict[SampleState, frozenset[SampleState]] = {
    SampleState.QUEUED: frozenset({SampleState.RUNNING, SampleState.DROPPED}),
    SampleState.RUNNING: frozenset({SampleState.INTERRUPTED, SampleState.GENERATED, SampleState.DROPPED}),
    SampleState.INTERRUPTED: frozenset({SampleState.RUNNING, SampleState.DROPPED}),
    SampleState.GENERATED: frozenset({SampleState.REWARDED, SampleState.DROPPED}),
    SampleState.REWARDED: frozenset({SampleState.READY, SampleState.DROPPED}),
    SampleState.READY: frozenset({SampleState.TRAINED, SampleState.DROPPED}),
}
SETTLED_STATES = frozenset({SampleState.REWARDED, SampleState.READY})
"""Of a sample that is to be trained, but for the rest of its group."""
FORK = "~"
"""In the id of a sample between that of the one it was forked from and its own name."""
TOKEN_BYTES = 13
"""Of a response's token in a payload: id, mark, log-probability, version."""
OBSERVED_VERSION = -1
"""Version of a token that no policy sampled (tool output, environment observation)."""
NO_EXPERT = -1
"""In a record of routed experts: what the engine chose for this token is not known."""


@dataclass(slots=True)
class Sample:
    """Example: prompt [5, 6], the policy of version 3 samples [7, 8], a tool answers [9]::

    sample.append([7, 8], logprobs=[-0.1, -0.7], version=3)
    sample.append([9])
    sample.sampled            # [True, True, False]
    sample.behavior_logprobs  # [-0.1, -0.7, 0.0]
    """

    sample_id: str
    group_id: str
    prompt_id: str
    prompt_tokens: tuple[int, ...]
    response_tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    reward: float | None = None
    correct: bool | None = None
    routing: list[bytes] = field(default_factory=list)
    """Experts that the engine chose for each of the first tokens while it computed them: int16 [layers * experts per
    token], little-endian; empty where they are not known. The last token is not computed and has none."""

    def append(
        self, tokens: Sequence[int], logprobs: Sequence[float] | None = None, version: int | None = None
    ) -> None:
        """Add tokens that the policy sampled (with `logprobs` and `version`) or observed (without either).

        Raises:
            ValueError: one of `logprobs` and `version` is missing, or their lengths differ.
        """
        if (logprobs is None) != (version is None):
            raise ValueError(f"sample {self.sample_id}: sampled tokens need both logprobs and a version")
        if logprobs is not None and len(logprobs) != len(tokens):
            raise ValueError(
                f"sample {self.sample_id}: {len(tokens)} tokens with {len(logprobs)} logprobs; "
                "the engine must return one logprob for each token that it samples"
            )
        count = len(tokens)
        self.response_tokens.extend(tokens)
        self.sampled.extend([logprobs is not None] * count)
        self.behavior_logprobs.extend(logprobs if logprobs is not None else [0.0] * count)
        self.versions.extend([version if version is not None else OBSERVED_VERSION] * count)

    def note_routing(self, first: int, rows: np.ndarray) -> None:
        """Keep which experts an engine chose, for the tokens from place `first` on to the last but one.

        What is there already stays: an engine that computes a token again, under new weights, chooses anew, and the
        tokens behind were sampled under the first choice. Tokens between what is there and `first` have none.

        Args:
            rows: [tokens, layers * experts per token], whole numbers.

        Raises:
            ValueError: the rows are not those of the sample's tokens.
        """
        if first + len(rows) != len(self.prompt_tokens) + len(self.response_tokens) - 1:
            raise ValueError(
                f"sample {self.sample_id}: routed experts of {len(rows)} tokens from token {first} on do not end at "
                f"the last but one of {len(self.prompt_tokens) + len(self.response_tokens)} tokens"
            )
        self.routing.extend([b""] * (first - len(self.routing)))
        self.routing.extend(pack_array(row, "int16") for row in rows[len(self.routing) - first :])

    @property
    def tokens(self) -> list[int]:
        """Prompt and response ids."""
        return [*self.prompt_tokens, *self.response_tokens]

    def meta(self) -> SampleMeta:
        """What the trainer needs for balancing and advantages, without the tokens."""
        of_policy = [version for version in self.versions if version != OBSERVED_VERSION]
        if self.reward is None or not of_policy:
            raise ValueError(f"sample {self.sample_id} is not ready: it needs sampled tokens and a reward")
        return SampleMeta(
            sample_id=self.sample_id,
            group_id=self.group_id,
            prompt_length=len(self.prompt_tokens),
            response_length=len(self.response_tokens),
            sampled_length=sum(self.sampled),
            oldest_version=min(of_policy),
            newest_version=max(of_policy),
            reward=self.reward,
            correct=self.correct,
            finish_reason=self.finish_reason or "",
            prompt_hash=hash(self.prompt_tokens),
        )

    def payload(self) -> SamplePayload:
        return SamplePayload(
            sample_id=self.sample_id,
            prompt_length=len(self.prompt_tokens),
            tokens=pack_array(self.tokens, "int32"),
            sampled=pack_array(self.sampled, "uint8"),
            behavior_logprobs=pack_array(self.behavior_logprobs, "float32"),
            versions=pack_array(self.versions, "int32"),
            routing=self._whole_routing(),
        )

    def _whole_routing(self) -> bytes:
        """One row for each token, or nothing at all."""
        width = max(map(len, self.routing), default=0)
        unknown = pack_array([NO_EXPERT] * (width // 2), "int16")
        missing = len(self.prompt_tokens) + len(self.response_tokens) - len(self.routing)
        return b"".join([*(row or unknown for row in self.routing), *[unknown] * missing])

    def saved(self) -> SavedSample:
        """For a checkpoint; `restored` is the way back."""
        return SavedSample(self.payload(), self.prompt_id, self.reward, self.correct, self.finish_reason)

    @staticmethod
    def restored(saved: SavedSample, group_id: str) -> "Sample":
        """The same sample, its log-probabilities rounded to float32 as the trainer gets them."""
        arrays, prompt_length = response_arrays(saved.payload), saved.payload.prompt_length
        tokens = arrays.pop("tokens")
        return Sample(
            sample_id=saved.payload.sample_id,
            group_id=group_id,
            prompt_id=saved.prompt_id,
            prompt_tokens=tuple(tokens[:prompt_length]),
            response_tokens=tokens[prompt_length:],
            finish_reason=saved.finish_reason,
            reward=saved.reward,
            correct=saved.correct,
            routing=_routing_rows(saved.payload.routing, len(tokens)),
            **arrays,
        )


def response_arrays(payload: SamplePayload) -> dict[str, list]:
    """`tokens` (prompt + response), `sampled`, `behavior_logprobs`, `versions` (response only), as lists."""
    return {
        "tokens": unpack_array(payload.tokens, "int32").tolist(),
        "sampled": unpack_array(payload.sampled, "uint8").astype(bool).tolist(),
        "behavior_logprobs": unpack_array(payload.behavior_logprobs, "float32").tolist(),
        "versions": unpack_array(payload.versions, "int32").tolist(),
    }


def _routing_rows(routing: bytes, tokens: int) -> list[bytes]:
    """As a sample keeps them: nothing for tokens behind the last one that has a row."""
    width = len(routing) // tokens if tokens else 0
    unknown = pack_array([NO_EXPERT] * (width // 2), "int16")
    rows = [routing[start : start + width] for start in range(0, len(routing), width or 1)]
    rows = [b"" if row == unknown else row for row in rows]
    while rows and not rows[-1]:
        rows.pop()
    return rows
