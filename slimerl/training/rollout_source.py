"""The samples of a step from the rollout role: metadata to every rank, payload only where it is computed.

Flows in: manifests and payloads of the control service. Flows out: this rank's micro-batches.
Invariant: all ranks derive the same advantages and the same plan from the same manifest; each replica's leader
fetches the payload of that replica's samples alone and passes it on inside the replica. Where several rollout processes
hold samples, and one does not give its own, all ranks ask for the batch again: the ledger makes it up anew once it
knows that they are lost.
"""

import logging
import time

import msgspec

from slimerl.algorithms import Algorithm
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.samples.messages import (
    BatchManifest,
    EvaluateReply,
    RolloutState,
    SampleMeta,
    SamplePayload,
    SyncWanted,
    decode,
    encode,
)
from slimerl.spec import RunSpec
from slimerl.telemetry import trace
from slimerl.training.batching import Batching
from slimerl.training.clock import StepClock
from slimerl.training.packing import SampleShape, StepPlan
from slimerl.training.parallel import Grid, anywhere, broadcast_bytes
from slimerl.training.rollout_client import RolloutClient, ServiceFailed
from slimerl.training.source import StepInput
from slimerl.training.step import PolicyTrainer
from slimerl.training.training_sample import BadSample, TrainingSample

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
"""For the ledger to learn that samples are lost."""


class RolloutSource:
    """`client`: on the leaders of replicas; None elsewhere."""

    def __init__(
        self, spec: RunSpec, grid: Grid, algorithm: Algorithm, batching: Batching, client: RolloutClient | None
    ) -> None:
        self._spec, self._grid, self._algorithm, self._client = spec, grid, algorithm, client
        self._batching = batching
        self._batch_id = ""
        self._shards: dict[str, int] = {}
        """Of the batch, as in its manifest."""

    def take(self, step: int, clock: StepClock) -> StepInput | None:
        """Wait for the batch of `step`; None: engines want the present weights first. Raises ServiceFailed,
        DeadlineExceeded or BadSample."""
        lost: Deadline | None = None
        while True:
            with clock(step, "wait"):
                manifest = self._manifest(step)
            if isinstance(manifest, SyncWanted):
                return None
            with clock(step, "fetch"):
                if (taken := self._fetched(manifest)) is not None:
                    return taken
            lost = lost or Deadline(f"all samples of step {step}", self._spec.deadlines.start_s)
            with clock(step, "wait"):
                if self._grid.is_first:
                    lost.check("a rollout process does not give its own; what it said stands above")
                    time.sleep(min(ASK_AGAIN_S, lost.remaining_s))

    def _fetched(self, manifest: BatchManifest) -> StepInput | None:
        """The batch, made ready; None: some of it could not be had."""
        self._batch_id, self._shards = manifest.batch_id, manifest.shards
        metas = manifest.samples
        with trace.span("advantages"):
            # where they differ from token to token, the trainer makes them of the samples' outcomes
            by_token = self._algorithm.needs.token_advantages
            score = self._algorithm.outcomes if by_token else self._algorithm.advantages
            advantages, figures = score(
                [meta.reward for meta in metas],
                [meta.group_id for meta in metas],
                [meta.response_length for meta in metas],
            )
        plan = self._batching.plan(
            [
                SampleShape(
                    *(meta.prompt_length, meta.response_length, meta.group_id, meta.sampled_length),
                    prefix=meta.prompt_hash,
                )
                for meta in metas
            ],
            self._spec.training.minibatches_per_step,
        )
        samples = self._samples(metas, advantages, plan)
        if samples is None:
            return None
        packs = self._batching.packs(plan, samples, self._grid.place.data)
        return StepInput(packs, manifest.metrics | figures)

    def trained(self, step: int) -> None:
        if self._grid.is_first and self._client is not None:
            self._client.trained(self._batch_id, version=step)

    def begin_evaluation(self, step: int) -> None:
        if self._grid.is_first and self._client is not None:
            self._client.begin_evaluation(step, self._spec.deadlines.batch_s)

    def evaluation_ended(self, step: int) -> bool:
        waits = False
        if self._grid.is_first and self._client is not None:
            waits = self._client.begin_evaluation(step, self._spec.deadlines.batch_s)
        return not anywhere(waits, self._grid)

    def evaluate(self, step: int, trainer: PolicyTrainer) -> dict[str, float] | None:
        data = None
        if self._grid.is_first and self._client is not None:
            data = encode(self._client.evaluate(step, self._spec.deadlines.batch_s))
        data = broadcast_bytes(data, self._grid, source=0)
        reply = msgspec.msgpack.decode(data, type=EvaluateReply | SyncWanted)
        if isinstance(reply, SyncWanted):
            return None
        figures = {"eval/seconds": reply.seconds} | reply.figures
        if not reply.prompts:
            return figures
        return figures | {
            "eval/accuracy": reply.accuracy,
            "eval/prompts": float(reply.prompts),
            "eval/failures": float(reply.failures),
            "eval/mean_response_tokens": reply.mean_response_tokens,
        }

    def state(self) -> bytes:
        return encode(self._client.state()) if self._grid.is_first and self._client is not None else b""

    def restore(self, state: bytes) -> None:
        if self._grid.is_first and self._client is not None:
            self._client.restore(decode(state, RolloutState))

    def _manifest(self, step: int) -> BatchManifest | SyncWanted:
        data = None
        if self._grid.is_first and self._client is not None:
            data = encode(self._client.next_batch(step, self._spec.deadlines.batch_s))
        return msgspec.msgpack.decode(broadcast_bytes(data, self._grid, source=0), type=BatchManifest | SyncWanted)

    def _samples(
        self, metas: list[SampleMeta], advantages: list[float], plan: StepPlan
    ) -> dict[int, TrainingSample] | None:
        """This replica's samples, by their place in the manifest; None: some, maybe of another's, could not be had."""
        own = [index for minibatch in plan.of_rank(self._grid.place.data) for part in minibatch for index in part]
        data = self._payloads([metas[index] for index in own])
        if self._shards and anywhere(data is None, self._grid):
            return None
        data = broadcast_bytes(data, self._grid, self._grid.leader, self._grid.replica)
        payloads = msgspec.msgpack.decode(data, type=list[SamplePayload])
        return {
            index: _checked(metas[index], payload, advantages[index])
            for index, payload in zip(own, payloads, strict=True)
        }

    def _payloads(self, metas: list[SampleMeta]) -> bytes | None:
        """On the leader of a replica what its samples have, encoded; nothing on its other ranks. None: one of several
        rollout processes does not give what it holds."""
        if not self._grid.is_leader or self._client is None:
            return b""
        ids = [meta.sample_id for meta in metas]
        if not self._shards:
            return encode(self._client.fetch(ids))
        try:
            return encode(self._client.fetch(ids, [self._shards[meta.group_id] for meta in metas]))
        except (ServiceFailed, DeadlineExceeded) as error:
            logger.warning("%s: samples could not be had: %s", self._batch_id, error)
            return None


def _checked(meta: SampleMeta, payload: SamplePayload, advantage: float) -> TrainingSample:
    """The plan was made from the metadata: a payload of another length would unbalance ranks, or hang them."""
    sample = TrainingSample.from_payload(payload, advantage)
    told = (meta.sample_id, meta.prompt_length, meta.response_length, meta.sampled_length)
    found = (sample.sample_id, sample.prompt_length, len(sample.sampled), int(sample.sampled.sum()))
    if told != found:
        raise BadSample(
            f"sample {meta.sample_id}: the manifest says (id, prompt, response, sampled) = {told}, its payload {found}"
        )
    return sample
