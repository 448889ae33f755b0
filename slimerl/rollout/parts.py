"""How the generation of a sample goes on, part by part: after an interruption, or in chunks (divided rollout). Pure.

Flows in: a sample with what it has so far, an engine's answer. Flows out: the request for its next part.
Invariants: tokens once generated stay, with the versions and log-probabilities they were sampled with; the parts
together have no more tokens than the sample may have; the draws of a sample are keyed by its seed and the position of
each token, so that under unchanged weights the parts are what one request would have given.
"""

from itertools import groupby

import msgspec
from msgspec.structs import replace

from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.rollout.dispatch import GenerateRequest
from slimerl.rollout.lengths import ResponseLengths
from slimerl.rollout.order import Progress
from slimerl.rollout.prompts import sampling_seed
from slimerl.samples.sample import Sample


class Parts(msgspec.Struct, frozen=True):
    """`params` are those of whole samples, but for the seed; `chunk_tokens`: of one request at most, None: no bound;
    `routing`: engines are asked which experts they chose."""

    params: SamplingParams
    run_seed: int
    chunk_tokens: int | None = None
    lengths: ResponseLengths = msgspec.field(default_factory=ResponseLengths)
    routing: bool = False

    def is_complete(self, sample: Sample) -> bool:
        return sample.finish_reason is not None

    def next_request(self, sample: Sample) -> GenerateRequest:
        """For the next part of a sample that is not complete."""
        done = len(sample.response_tokens)
        left = self.params.max_new_tokens - done
        part = replace(
            self.params,
            max_new_tokens=left if self.chunk_tokens is None else min(left, self.chunk_tokens),
            seed=sampling_seed(self.run_seed, sample.sample_id, attempt=0),
        )
        name = f"{sample.sample_id}+{done}" if done else sample.sample_id
        progress = Progress(sample.prompt_id, done, left)
        return GenerateRequest(
            *(name, sample.group_id, tuple(sample.tokens), part),
            session=sample.sample_id,
            progress=progress,
            routing_from=len(sample.routing) if self.routing else None,
        )

    def first_params(self) -> SamplingParams:
        """Of the first part of a sample whose seed `params` have."""
        if self.chunk_tokens is None or self.chunk_tokens >= self.params.max_new_tokens:
            return self.params
        return replace(self.params, max_new_tokens=self.chunk_tokens)

    def append(self, sample: Sample, generation: Generation) -> None:
        """Take what an engine generated for `next_request`."""
        append_generation(sample, generation)
        sample.finish_reason = self.ended(generation, sample.prompt_id, len(sample.response_tokens))

    def ended(self, generation: Generation, prompt_id: str, tokens: int | None = None) -> str | None:
        """What has ended a sample, whose length is then noted; None: it goes on.

        Args:
            tokens: of its response, with those of `generation`; None: it has no others.
        """
        count = len(generation.tokens) if tokens is None else tokens
        reason = self._end(generation, count)
        if reason is not None:
            self.lengths.observe(prompt_id, count)
        return reason

    def _end(self, generation: Generation, count: int) -> str | None:
        last = generation.tokens[-1:]
        # an engine that aborts a request, or ends a chunk, says so even where the last token was the end
        if generation.finish_reason == "stop" or set(last) & set(self.params.stop_token_ids):
            return "stop"
        return "length" if count >= self.params.max_new_tokens else None


def append_generation(sample: Sample, generation: Generation) -> None:
    """Append what the engine generated, one span of equal policy version after the other; `finish_reason` is what ended
    it there."""
    start = 0
    for version, run in groupby(generation.versions):
        end = start + len(list(run))
        sample.append(generation.tokens[start:end], generation.logprobs[start:end], version)
        start = end
    if generation.routing is not None:
        sample.note_routing(generation.routing.first, generation.routing.rows)
    sample.finish_reason = generation.finish_reason
