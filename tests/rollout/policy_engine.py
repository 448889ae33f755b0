"""An engine in this process that samples from a known policy: SGLang's answers, scores of the input included, and its
keyed draws. For tests of what the rollout makes of them."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from slimerl.engine.client import EngineRefused
from slimerl.engine.protocol import Generation, SamplingParams, generate_body, read_generation
from slimerl.rollout.speculation import coupled

TOKENS = 6
STOP = 0
Policy = np.ndarray
"""[TOKENS, TOKENS]: probabilities of the next token given the last one."""


def policy(seed: int, flatness: float = 0.7) -> Policy:
    law = np.random.default_rng(seed).dirichlet(np.full(TOKENS, flatness), size=TOKENS) + 0.01
    law[:, STOP] *= 0.3
    return law / law.sum(axis=1, keepdims=True)


class PolicyEngine:
    """`policies[version]` is what it samples from. `before` is awaited by every request, when it has come in; `faults`
    are used up one per scoring request ("500", "abort", "garbage"), `aborts` one per other request: it ends without a
    token."""

    def __init__(self, *policies: Policy) -> None:
        self.policies = policies
        self.version = 0
        self.before: Callable[[dict[str, Any]], Any] | None = None
        self.faults: deque[str] = deque()
        self.aborts = 0
        self.late_aborts = 0
        """As `aborts`, but with the tokens that were asked for."""
        self.requests: list[dict[str, Any]] = []
        self.cached: set[tuple[int, ...]] = set()

    @property
    def scored(self) -> list[dict[str, Any]]:
        return [body for body in self.requests if "logprob_start_len" in body]

    @property
    def decoded(self) -> list[dict[str, Any]]:
        return [body for body in self.requests if "logprob_start_len" not in body]

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None,
        timeout_s: float | None,
        extra: Mapping[str, Any] | None,
        told: Callable[[Generation], None] | None = None,
    ) -> Generation:
        body = generate_body(input_ids, params, request_id or "", extra or {})
        self.requests.append(body)
        await asyncio.sleep(0)
        if self.before is not None:
            await self.before(body)
        scoring = "logprob_start_len" in body
        fault = self.faults.popleft() if scoring and self.faults else ""
        if fault == "500":
            raise EngineRefused("engine-0", "/generate", 500, "injected")
        if not scoring and self.aborts:
            self.aborts -= 1
            fault = "abort"
        whole = read_generation(self._answer(body, fault))
        for one in zip(whole.tokens, whole.logprobs, whole.versions, strict=True):
            if told is not None:
                told(Generation(*([each] for each in one), "", whole.meta, whole.answer))
        return whole

    def _answer(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        tokens, params = list(body["input_ids"]), body["sampling_params"]
        law = np.log(self.policies[self.version])
        drawn = [] if fault == "abort" else self._drawn(tokens, params, law)
        stopped = bool(drawn) and drawn[-1][1] in params.get("stop_token_ids", [])
        if self.late_aborts and "logprob_start_len" not in body:
            self.late_aborts, fault = self.late_aborts - 1, "abort"
        meta = {
            "finish_reason": {"type": "abort" if fault == "abort" else "stop" if stopped else "length"},
            "output_token_logprobs": drawn,
            "weight_version": str(self.version),
            "cached_tokens": self._cached(tokens, body.get("logprob_start_len", len(tokens))),
        }
        if "logprob_start_len" in body and fault != "abort":
            places = range(body["logprob_start_len"] + 1, len(tokens))
            scores = [[float(law[tokens[at - 1], tokens[at]]), tokens[at], None] for at in places]
            meta["input_token_logprobs"] = [[None, tokens[places.start - 1], None], *scores]
            wanted = body["top_logprobs_num"]
            listed = [
                [[float(row[one]), int(one), None] for one in np.argsort(-row)[:wanted]]
                for row in (law[tokens[at - 1]] for at in places)
            ]
            meta["input_top_logprobs"] = [None, *listed]
            if fault == "garbage":
                meta["input_token_logprobs"] = meta["input_token_logprobs"][:-1]
        return {"output_ids": [one[1] for one in drawn], "meta_info": meta}

    def _drawn(self, tokens: list[int], params: dict[str, Any], law: np.ndarray) -> list[list[Any]]:
        found: list[list[Any]] = []
        while len(found) < params["max_new_tokens"]:
            row = law[tokens[-1]].copy()
            for token, bias in params.get("logit_bias", {}).items():
                row[int(token)] += bias
            row -= np.logaddexp.reduce(row)
            gumbel = coupled.noise(np.array([params["sampling_seed"]]), np.array([len(tokens) - 1]), TOKENS)[0]
            token = int(coupled.draw(row, gumbel))
            found.append([float(row[token]), token, None])
            tokens.append(token)
            if token in params.get("stop_token_ids", []):
                break
        return found

    def _cached(self, tokens: list[int], at_most: int) -> int:
        known = max((length for length in range(len(tokens)) if tuple(tokens[:length]) in self.cached), default=0)
        self.cached |= {tuple(tokens[:length]) for length in range(len(tokens) + 1)}
        return min(known, at_most)

    async def healthy(self, *, timeout_s: float | None) -> bool:
        return True

    async def weight_version(self, *, timeout_s: float | None) -> int:
        return self.version

    async def continue_generation(self, *, timeout_s: float | None) -> None: ...

    async def close(self) -> None: ...
