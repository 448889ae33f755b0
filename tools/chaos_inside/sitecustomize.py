"""Found by every Python process of a run under fire whose PYTHONPATH holds this directory: roles commit the faults that
appear as files in the directory `SLIMERL_CHAOS`, each once.

A trainer rank:
    dropped   the answer of the rollout role to a call is lost, though the role has done what it was asked
    delayed   an answer comes late
    spoilt    the advantage of a sample is no number, and so the gradient is none
The rollout role, to an engine's answer with tokens, of no sample twice:
    no-json, cut-off, no-token, no-logprob
"""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def is_due(name: str) -> bool:
    return Path(os.environ["SLIMERL_CHAOS"], name).exists()


def taken(name: str) -> bool:
    try:
        Path(os.environ["SLIMERL_CHAOS"], name).unlink()
    except FileNotFoundError:
        return False
    return True


def in_trainer() -> None:
    from dataclasses import replace

    from slimerl.samples.messages import Path as Endpoint
    from slimerl.samples.messages import SamplePayload
    from slimerl.training.rollout_client import NOT_TWICE, REPEATED, RoleGone, RolloutClient
    from slimerl.training.training_sample import TrainingSample

    delay_s = 3.0
    ask, read = RolloutClient._once, TrainingSample.from_payload

    def asked(self: RolloutClient, method: str, path: Endpoint, body: bytes, timeout_s: float) -> bytes:
        answer = ask(self, method, path, body, timeout_s)
        if path not in REPEATED or path in NOT_TWICE:
            return answer
        if taken("delayed"):
            time.sleep(delay_s)
        if taken("dropped"):
            raise RoleGone(f"{path}: the connection was dropped")
        return answer

    def from_payload(payload: SamplePayload, advantage: float) -> TrainingSample:
        sample = read(payload, advantage)
        return replace(sample, advantage=float("nan")) if taken("spoilt") else sample

    setattr(RolloutClient, "_once", asked)  # noqa: B010 - not where a type checker would look for it
    setattr(TrainingSample, "from_payload", staticmethod(from_payload))  # noqa: B010


def in_rollout() -> None:
    from slimerl.engine.connections import Connections, Take
    from slimerl.engine.protocol import Endpoint

    ask = Connections.request
    struck: set[str] = set()

    async def asked(
        self: Connections,
        method: str,
        path: str,
        body: Sequence[bytes | memoryview] = (),
        take: Take | None = None,
        limit_s: float = math.inf,
    ) -> tuple[int, bytes]:
        status, content = await ask(self, method, path, body, take, limit_s)
        due = path == Endpoint.GENERATE and status == 200 and content and any(map(is_due, GARBAGE))
        if not due:
            return status, content
        answer = json.loads(content)
        # the number of the try stands behind it
        sample = json.loads(b"".join(body))["rid"].partition("#")[0]
        if not answer.get("output_ids") or sample in struck:
            return status, content
        for form, garbled in GARBAGE.items():
            if taken(form):
                struck.add(sample)
                return status, garbled(content, answer)
        return status, content

    setattr(Connections, "request", asked)  # noqa: B010


def no_token(content: bytes, answer: dict) -> bytes:
    """An id that no vocabulary has, in both places that tell of it."""
    answer["output_ids"][-1] = answer["meta_info"]["output_token_logprobs"][-1][1] = 2**40
    return json.dumps(answer).encode()


def no_logprob(content: bytes, answer: dict) -> bytes:
    """As SGLang writes one that is NaN."""
    answer["meta_info"]["output_token_logprobs"][-1][0] = None
    return json.dumps(answer).encode()


GARBAGE = {
    "no-json": lambda content, answer: b"<html>Bad Gateway</html>",
    "cut-off": lambda content, answer: content[: len(content) // 2],
    "no-token": no_token,
    "no-logprob": no_logprob,
}

if "SLIMERL_CHAOS" in os.environ:
    if "slimerl.training" in sys.orig_argv:
        in_trainer()
    elif "slimerl.rollout" in sys.orig_argv:
        in_rollout()
