"""The books of a sample that an agent loop makes: its state in the store, and what its group's record notes.

Flows in: what the policy handle tells. Flows out: transitions of the store, figures of the record.
"""

import time
from dataclasses import dataclass, replace

from slimerl.rollout.agents.policy import Watcher
from slimerl.rollout.dispatch import Completion
from slimerl.rollout.statistics import GroupRecord
from slimerl.samples.sample import Sample
from slimerl.samples.store import SampleStore


@dataclass
class BookedSample(Watcher):
    sample: Sample
    store: SampleStore
    record: GroupRecord
    forks: dict[str, Sample]
    """What forks of before a restart have, by id."""

    def started(self) -> None:
        self.store.start(self.sample.sample_id)
        if self.record.started_s is None:
            self.record.started_s = time.monotonic()

    def paused(self, interrupted: bool) -> None:
        self.store.interrupt(self.sample.sample_id)
        self.record.interruptions += interrupted

    def answered(self, prompt_tokens: int, completion: Completion) -> None:
        self.record.retries += completion.tries - 1
        self.record.prompt_tokens += prompt_tokens
        self.record.cached_tokens += completion.generation.cached_tokens

    def forked(self, fork: Sample) -> "tuple[Sample, BookedSample]":
        known = self.forks.pop(fork.sample_id, fork)
        if known.prompt_tokens != fork.prompt_tokens:
            known = fork
        self.store.join(known)
        return known, replace(self, sample=known)

    def counted(self, name: str) -> None:
        self.record.agent[name] += 1

    def ended(self, turns: int) -> None:
        self.record.turns[self.sample.sample_id] = turns
