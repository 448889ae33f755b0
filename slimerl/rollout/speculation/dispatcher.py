"""The dispatcher that generates with drafts: `generate` as ever, in fewer decoded tokens.

Flows in: `GenerateRequest`s. Flows out: one `Completion` each, as of a single request to an engine.
A request with a draft becomes up to 2n + 1 requests: score the draft behind the context (nothing is generated), draw
the token behind a rejection, and so n times; then decode the rest.

Invariants: without a draft the request goes out as it came. A kept token carries the log-probability under the weights
that scored it, and their version. Scores count only where one version was in service from before they were asked for
until after they came; otherwise the whole draft is forgotten, before any of it is looked at, and nothing is lost. A
token that was rejected is not drawn again: also where new weights came meanwhile the residual is drawn, with the
log-probability of just that draw (rejected by the old, drawn among the others by the new ones).
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from slimerl.engine.protocol import Generation, ProtocolError, Scores, read_scores
from slimerl.rollout.dispatch import Completion, Dispatcher, GenerateRequest, GenerationFailed
from slimerl.rollout.live import Told
from slimerl.rollout.order import Progress
from slimerl.rollout.prompts import sampling_seed
from slimerl.rollout.speculation import coupled, rules
from slimerl.rollout.speculation.drafts import Draft, Drafts, names_a_prompt, prompt_of
from slimerl.rollout.speculation.drafts_file import DraftsFile
from slimerl.rollout.speculation.figures import Figures
from slimerl.samples.messages import EngineState
from slimerl.spec.speculation import SpeculationSpec

logger = logging.getLogger(__name__)

ALTERNATIVES = 512
"""Most likely tokens that the coupled tier asks for at each place: all of a small vocabulary; of a large one enough to
tell most winners."""
WORTHWHILE = 2
"""Tokens that a draft must have given for another one to be tried: below, decoding is as fast."""
NEVER = -1e9
"""Logit bias of a token that is not to be drawn; its probability is 0 in float32."""


def _nothing() -> None:
    pass


@dataclass
class Speculation:
    """What the drafts of a run come from and how they are taken.

    Args of the constructor:
        vocabulary: `vocab_size` of the model.
        log_lenience: of the lenient tier.
        file: where answers outlive this process; None: they do not.
    """

    spec: SpeculationSpec
    run_seed: int
    vocabulary: int
    log_lenience: float = 0.0
    file: DraftsFile | None = None
    figures: Figures = field(default_factory=Figures)
    drafts: Drafts = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = Drafts(self.spec.memory_tokens, siblings=self.spec.from_siblings)

    @property
    def alternatives(self) -> int:
        return min(self.vocabulary, ALTERNATIVES) if self.spec.tier == "coupled" else 0

    def applies(self, request: GenerateRequest) -> bool:
        """Is the request for a sample of a known prompt, and do engines score what they would draw from?"""
        params = request.params
        plain = params.temperature == 1.0 and params.top_p == 1.0 and params.seed is not None and not params.extra
        return plain and names_a_prompt(request.group)

    def keyed(self, request: GenerateRequest) -> GenerateRequest:
        """With the seed of its tier: coupled draws use that of the same sample in every epoch."""
        if self.spec.tier != "coupled":
            return request
        sample = f"{prompt_of(request.group)}{request.session.removeprefix(request.group)}"
        seed = sampling_seed(self.run_seed, f"coupled/{sample}", attempt=0)
        return replace(request, params=replace(request.params, seed=seed))

    def draft(self, request: GenerateRequest, context: list[int], left: int, version: int) -> Draft | None:
        """For what comes behind `context`, at most `left` tokens, up to a stop token."""
        limit = min(left, self.spec.draft_tokens)
        found = None
        if self.spec.tier != "exact":
            found = self.drafts.again(request.group, request.session, context, limit, version)
        if found is None and self.spec.tier != "lenient":
            found = self.drafts.behind(request.group, request.session, context, limit, version)
        if found is None:
            return None
        stops = [at for at, token in enumerate(found.tokens) if token in request.params.stop_token_ids]
        if not stops:
            return found
        return Draft(found.tokens[: stops[0] + 1], found.logprobs[: stops[0] + 1], ends=True)

    async def kept(self, request: GenerateRequest, start: int, draft: Draft, scores: Scores) -> int:
        """Tokens of a draft at `start` that are kept."""
        new = np.array(scores.logprobs)
        count, seed = len(draft.tokens), request.params.seed or 0
        if self.spec.tier == "coupled":
            # noise of a whole vocabulary for every token: a tenth of a second where both are large
            return await asyncio.to_thread(self._drawn_again, seed, start, draft, scores)
        uniforms = rules.keyed_uniforms(seed, request.session, start, count)
        if self.spec.tier == "lenient":
            self.figures.compared(new, draft.logprobs)
            acceptance = rules.lenient_acceptance(new, draft.logprobs, float(np.exp(self.log_lenience)))
        else:
            acceptance = rules.exact_acceptance(new)
        return int(rules.kept(acceptance, uniforms))

    def _drawn_again(self, seed: int, start: int, draft: Draft, scores: Scores) -> int:
        for at, (token, (ids, logprobs)) in enumerate(zip(draft.tokens, scores.alternatives, strict=True)):
            # the token at a place is drawn with the noise of the one before
            gumbel = coupled.noise(np.array([seed]), np.array([start + at - 1]), self.vocabulary)[0]
            if coupled.certain_winner(np.array(ids), np.array(logprobs), gumbel) != token:
                return at
        return len(draft.tokens)

    async def save(self, step: int) -> None:
        """For a run that goes on after `step`."""
        if self.file is not None:
            await asyncio.to_thread(self.file.write, step, self.drafts.answers())

    async def restore(self, step: int) -> None:
        if self.file is not None and step:
            self.drafts.restore(await asyncio.to_thread(self.file.read, step))

    def take_figures(self) -> dict[str, float]:
        lenient = self.spec.tier == "lenient"
        return self.figures.take(float(np.exp(self.log_lenience)) if lenient else None)


@dataclass
class _Answer:
    """What a request has been answered so far."""

    request: GenerateRequest
    started: Callable[[], None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    parts: list[Completion] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        return [*self.request.tokens, *self.tokens]

    @property
    def left(self) -> int:
        return self.request.params.max_new_tokens - len(self.tokens)

    def start(self) -> None:
        """Of the first request alone."""
        started, self.started = self.started, _nothing
        started()

    def take(self, tokens: list[int], logprobs: list[float], versions: list[int]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        if self.left == 0:
            self.finish_reason = "length"

    def go_on(self) -> None:
        """Forget that an update ended a part, unless nothing is to come anyway."""
        stopped = set(self.tokens[-1:]) & set(self.request.params.stop_token_ids)
        self.finish_reason = "stop" if stopped else "length" if self.left == 0 else ""

    def so_far(self) -> Generation:
        last = self.parts[-1].generation
        return Generation(
            [*self.tokens], [*self.logprobs], [*self.versions], self.finish_reason, last.meta, last.answer
        )

    def completion(self) -> Completion:
        """As of one request: its cached tokens are those of the first part."""
        last = self.parts[-1]
        cached = min(self.parts[0].generation.cached_tokens, len(self.request.tokens))
        meta = {**last.generation.meta, "cached_tokens": cached}
        generation = Generation(
            *(self.tokens, self.logprobs, self.versions, self.finish_reason, meta, last.generation.answer)
        )
        return Completion(generation, last.engine_id, 1 + sum(part.tries - 1 for part in self.parts))


@dataclass
class SpeculativeDispatcher(Dispatcher):
    speculation: Speculation = field(kw_only=True)

    async def generate(
        self, request: GenerateRequest, started: Callable[[], None] = _nothing, urgent: bool = False
    ) -> Completion:
        """As of `Dispatcher`; urgent requests, and those whose draws cannot be scored, go without drafts."""
        if urgent or not self.speculation.applies(request):
            return await super().generate(request, started, urgent)
        told = request.told
        plain = replace(request, tokens=tuple(request.tokens), session=request.session or request.request_id, told=None)
        request = self.speculation.keyed(plain)
        answer = _Answer(request, started)
        self.speculation.figures.requests += 1
        await self._draft(answer)
        if told is not None and answer.tokens:
            told(answer.so_far())
        if not answer.finish_reason:
            await self._decode(answer, answer.left, told=told)
        if answer.tokens:
            self.speculation.drafts.add(
                *(request.group, request.session, request.tokens, answer.tokens, answer.logprobs),
                version=max(answer.versions),
                stopped=answer.finish_reason == "stop",
            )
        return answer.completion()

    async def _draft(self, answer: _Answer) -> None:
        """Take what drafts give."""
        speculation, begun = self.speculation, time.monotonic()
        for _ in range(speculation.spec.drafts_per_request):
            draft = speculation.draft(answer.request, answer.context, answer.left, self.router.version)
            if draft is None or not self._has_time():
                break
            scores = await self._score(answer, draft)
            if scores is None:
                speculation.figures.discarded += 1
                break
            kept = await speculation.kept(answer.request, len(answer.context), draft, scores)
            await self._take(answer, draft, scores, kept)
            if answer.finish_reason or kept < WORTHWHILE:
                break
        if answer.parts:
            speculation.figures.seconds += time.monotonic() - begun

    def _has_time(self) -> bool:
        """Is the batch small enough? Called where there is a draft."""
        serving = sum(engine.state is EngineState.SERVING for engine in self.router.engines())
        if self.in_flight < self.speculation.spec.max_running_requests * max(1, serving):
            return True
        self.speculation.figures.gated += 1
        return False

    async def _score(self, answer: _Answer, draft: Draft) -> Scores | None:
        """Of a draft behind the answer; None: it was scored by other weights than those of now, or not at all."""
        version, context = self.router.version, answer.context
        params = replace(
            answer.request.params,
            max_new_tokens=0,
            score_from=len(context),
            score_alternatives=self.speculation.alternatives,
        )
        request = replace(
            answer.request,
            request_id=f"{answer.request.request_id}~{len(context)}",
            tokens=(*context, *draft.tokens),
            params=params,
            expected_new_tokens=1,
            progress=_after(answer.request.progress, len(answer.tokens)),
        )
        try:
            scored = await super().generate(request, answer.start)
            answer.parts.append(scored)
            self._prefilled(request, scored)
            if scored.generation.finish_reason == "abort":
                return None
            scores = read_scores(scored.generation, draft.tokens)
            if self.speculation.alternatives and len(scores.alternatives) != len(draft.tokens):
                raise ProtocolError(
                    f"{len(draft.tokens)} places, but {len(scores.alternatives)} lists of likely tokens"
                )
        except (GenerationFailed, ProtocolError) as error:
            logger.warning("%s goes on without its draft: %s", answer.request.request_id, error)
            return None
        return scores if scores.version == version == self.router.version else None

    async def _take(self, answer: _Answer, draft: Draft, scores: Scores, kept: int) -> None:
        figures = self.speculation.figures
        figures.drafts += 1
        figures.drafted += len(draft.tokens)
        figures.accepted += kept
        answer.take(list(draft.tokens[:kept]), scores.logprobs[:kept], [scores.version] * kept)
        if kept == len(draft.tokens):
            answer.finish_reason = "stop" if draft.ends else answer.finish_reason
        elif self.speculation.spec.tier == "exact":
            await self._residual(answer, draft.tokens[kept], scores.logprobs[kept])

    async def _residual(self, answer: _Answer, rejected: int, logprob: float) -> None:
        """One token that is not `rejected`, which would have been kept with `logprob`."""
        bias = {"logit_bias": {str(rejected): NEVER}}
        before = len(answer.tokens)
        while len(answer.tokens) == before:  # an update may abort it: it must be drawn all the same
            await self._decode(answer, 1, bias)
            if answer.finish_reason == "abort":
                answer.go_on()
        answer.logprobs[-1] = float(rules.residual_logprob(answer.logprobs[-1], logprob))

    async def _decode(self, answer: _Answer, tokens: int, extra: dict | None = None, told: Told | None = None) -> None:
        """Let an engine go on with up to so many tokens."""
        whole, context = answer.request, answer.context
        request = whole
        if answer.tokens or extra:
            expected = max(1, whole.expected_new_tokens - len(answer.tokens)) if whole.expected_new_tokens else 0
            request = replace(
                whole,
                request_id=f"{whole.request_id}+{len(context)}",
                tokens=tuple(context),
                params=replace(whole.params, max_new_tokens=tokens, extra=extra or {}),
                expected_new_tokens=min(expected, tokens),
                progress=_after(whole.progress, len(answer.tokens)),
            )
        completion = await super().generate(replace(request, told=told) if told else request, answer.start)
        answer.parts.append(completion)
        self._prefilled(request, completion)
        self.speculation.figures.decoded += len(completion.generation.tokens)
        generation = completion.generation
        answer.take(generation.tokens, generation.logprobs, generation.versions)
        if generation.finish_reason != "length":
            answer.finish_reason = generation.finish_reason

    def _prefilled(self, request: GenerateRequest, completion: Completion) -> None:
        self.speculation.figures.prefilled += len(request.tokens) - completion.generation.cached_tokens


def _after(progress: Progress | None, tokens: int) -> Progress | None:
    """The progress of a sample that has so many tokens more."""
    return progress and dataclasses.replace(progress, done=progress.done + tokens, left=progress.left - tokens)
