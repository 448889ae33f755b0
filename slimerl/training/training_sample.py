"""One sample as the trainer needs it, checked.

Flows in: a payload from the control service, or a row of the data. Flows out: arrays.
Invariant: the response's arrays have one entry per response token.
"""

from dataclasses import dataclass

import numpy as np

from slimerl.samples.messages import SamplePayload, unpack_array


class BadSample(ValueError):
    """A sample's arrays contradict each other; names the sample."""


@dataclass(frozen=True)
class TrainingSample:
    """One sample as the trainer needs it.

    Args:
        tokens: [prompt + response] ids.
        sampled: [response] bool; False on tokens that the policy did not sample.
        behavior_logprobs: [response] float32; 0 where not sampled.
        advantage: of the whole sample.
        routing: [prompt + response, layers * experts per token] int16, the experts that the engine chose, -1 where they
            are not known; None: none were asked for.
        margin: of the chosen answer of a pair, by how much it should lead.
    """

    sample_id: str
    tokens: np.ndarray
    prompt_length: int
    sampled: np.ndarray
    behavior_logprobs: np.ndarray
    advantage: float
    routing: np.ndarray | None = None
    margin: float = 0.0

    def __post_init__(self) -> None:
        response = len(self.tokens) - self.prompt_length
        if self.prompt_length < 1 or not response == len(self.sampled) == len(self.behavior_logprobs):
            raise BadSample(
                f"sample {self.sample_id}: {len(self.tokens)} tokens, {self.prompt_length} of them prompt, "
                f"with {len(self.sampled)} marks and {len(self.behavior_logprobs)} log-probabilities of the response"
            )
        if not np.isfinite(self.behavior_logprobs).all():
            raise BadSample(f"sample {self.sample_id}: a behaviour log-probability is not finite")
        if self.routing is not None and len(self.routing) != len(self.tokens):
            raise BadSample(
                f"sample {self.sample_id}: {len(self.routing)} rows of routed experts for {len(self.tokens)} tokens"
            )

    @staticmethod
    def from_payload(payload: SamplePayload, advantage: float) -> "TrainingSample":
        tokens = unpack_array(payload.tokens, "int32")
        return TrainingSample(
            sample_id=payload.sample_id,
            tokens=tokens,
            prompt_length=payload.prompt_length,
            sampled=unpack_array(payload.sampled, "uint8").astype(bool),
            behavior_logprobs=unpack_array(payload.behavior_logprobs, "float32"),
            advantage=advantage,
            routing=_routing(payload, len(tokens)),
        )


def _routing(payload: SamplePayload, tokens: int) -> np.ndarray | None:
    if not payload.routing:
        return None
    experts = unpack_array(payload.routing, "int16")
    if tokens == 0 or len(experts) % tokens:
        raise BadSample(f"sample {payload.sample_id}: {len(experts)} routed experts do not divide by {tokens} tokens")
    return experts.reshape(tokens, -1)
