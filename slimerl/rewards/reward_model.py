"""A trained reward model as reward: the score of prompt and response, by their token ids.

Flows in: requests with tokens, which the model's tokenizer has written (it is the policy's). Flows out: the score at
the last token as reward; above `correct_from` the response counts as correct.
Invariant: tokens are scored as they were sampled, never written out and tokenised again.

Two ways to the same score: `scorer` holds the model in a worker process (transformers on the CPU), `ServedModel` asks
an SGLang server that was started with `--is-embedding`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored
from slimerl.rewards.remote import RemoteFailure, RemoteScorer

CLASSIFY_PATH = "/classify"
_NO_TOKENS = Failed("no_tokens", "a reward model scores token ids, and the request has none")


def scorer(path: str, correct_from: float) -> Callable[[RewardRequest], Outcome]:
    """For a worker. Raises what transformers raises where the checkpoint is none of a model with a scalar head."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(1)
    # its own pooling would take a padding token that is also the end of sequence for no token
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto").eval()
    head = model.score.weight[0].float()

    @torch.inference_mode()
    def score(request: RewardRequest) -> Outcome:
        if not request.tokens:
            return _NO_TOKENS
        hidden = model.base_model(torch.tensor([request.tokens]), use_cache=False).last_hidden_state[0, -1]
        return _scored(float(hidden.float() @ head), correct_from)

    return score


class _Pooled(msgspec.Struct, frozen=True):
    embedding: list[float]


@dataclass(frozen=True)
class ServedModel(RemoteScorer):
    """`remote.url` ends with `CLASSIFY_PATH`."""

    correct_from: float

    async def score(self, request: RewardRequest) -> Outcome:
        if not request.tokens:
            return _NO_TOKENS
        try:
            body = await self.remote.post({"input_ids": request.tokens})
            scores = msgspec.json.decode(body, type=_Pooled).embedding
        except RemoteFailure as failure:
            return Failed(failure.reason, str(failure))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return Failed("garbled", f"not the answer of {CLASSIFY_PATH}: {error}")
        if len(scores) != 1:
            return Failed("garbled", f"{len(scores)} numbers for one sequence: the server's model has no scalar head")
        return _scored(scores[0], self.correct_from)


def _scored(score: float, correct_from: float) -> Outcome:
    if not math.isfinite(score):
        return Failed("not_finite", f"the score is {score}")
    return Scored(score, score > correct_from)
