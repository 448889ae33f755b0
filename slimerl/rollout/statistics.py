"""What a batch's manifest says of how it was made.

Flows in: the batch's metadata, what was noted of its groups, drops since the last batch. Flows out: `rollout/…` and
`staleness/…` figures. Clock readings are seconds of one monotonic clock.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from slimerl.rollout.agents.policy import LENGTH, OVERFLOW
from slimerl.samples.messages import SampleMeta, SamplePayload
from slimerl.samples.sample import OBSERVED_VERSION, Sample
from slimerl.telemetry import trace

TRUNCATED = frozenset({LENGTH, OVERFLOW})
"""Finish reasons of samples that had no token left."""


@dataclass(slots=True)
class GroupRecord:
    """What the scheduler notes of a group while it is made."""

    started_s: float | None = None
    """First dispatch of one of its samples."""
    generated_s: float | None = None
    """End of the last generation of its samples."""
    ready_s: float | None = None
    foretold_tokens: float | None = None
    """Mean length of its responses, as it was expected when they were sent."""
    judged_s: dict[str, float] = field(default_factory=dict)
    """Sample id → seconds from the end of its generation to its reward."""
    unparsable: set[str] = field(default_factory=set)
    reward_failed: set[str] = field(default_factory=set)
    retries: int = 0
    """Requests that an engine failed."""
    prompt_tokens: int = 0
    """Of all requests: what a sample has already counts each time that it goes on."""
    cached_tokens: int = 0
    """Of these, those whose KV the engine had."""
    interruptions: int = 0
    """Times that a sample went on in another request: chunks, and new weights in `abort` mode."""
    agent: Counter[str] = field(default_factory=Counter)
    """What agent loops count, by name."""
    turns: dict[str, int] = field(default_factory=dict)
    """Sample id → turns of the policy."""


def batch_metrics(
    samples: Sequence[SampleMeta],
    groups: Sequence[GroupRecord],
    dropped: Mapping[str, int],
    version: int,
    replaced: Sequence[Sequence[bool | None]] | None = None,
) -> dict[str, float]:
    """Figures of one batch.

    Args:
        samples: of the batch, dropped ones not among them.
        groups: the record of each of its groups.
        dropped: samples dropped since the last batch, by reason.
        version: policy version that the batch is handed out under.
        replaced: whether each answer was right, of each group that was replaced since the last batch; None: none is.
    """
    started = [group.started_s for group in groups if group.started_s is not None]
    ready = [group.ready_s for group in groups if group.ready_s is not None]
    seconds = max(ready) - min(started) if started and ready else 0.0
    tokens = sum(sample.sampled_length for sample in samples)
    turns = [each for group in groups for each in group.turns.values()]
    agent = sum((group.agent for group in groups), Counter[str]())
    judged = [seconds for group in groups for seconds in group.judged_s.values()]
    correct = [sample.correct for sample in samples if sample.correct is not None]
    staleness = [version - sample.oldest_version for sample in samples]
    count = len(samples)
    metrics = {
        "rollout/samples": float(count),
        "rollout/seconds": seconds,
        "rollout/generated_tokens": float(tokens),
        "rollout/tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "rollout/reward_seconds": fmean(judged) if judged else 0.0,
        "rollout/mean_response_tokens": fmean(sample.response_length for sample in samples),
        "rollout/max_response_tokens": float(max(sample.response_length for sample in samples)),
        "rollout/truncated_fraction": sum(sample.finish_reason in TRUNCATED for sample in samples) / count,
        "rollout/turns_mean": fmean(turns) if turns else 0.0,
        "rollout/turns_max": float(max(turns, default=0)),
        "rollout/observed_fraction": 1 - tokens / sum(sample.response_length for sample in samples),
        "rollout/mean_reward": fmean(sample.reward for sample in samples),
        "rollout/unparsable_fraction": sum(len(group.unparsable) for group in groups) / count,
        "rollout/reward_failed_fraction": sum(len(group.reward_failed) for group in groups) / count,
        "rollout/uniform_groups_fraction": _uniform_fraction(samples),
        "rollout/staleness_mean": fmean(staleness),
        "rollout/staleness_max": float(max(staleness)),
        "rollout/mixed_version_fraction": sum(s.newest_version > s.oldest_version for s in samples) / count,
        "rollout/interruptions": float(sum(group.interruptions for group in groups)),
        "rollout/cached_prompt_fraction": _cached_fraction(groups),
        "rollout/retries": float(sum(group.retries for group in groups)),
        "rollout/dropped": float(sum(dropped.values())),
    }
    if correct:
        metrics["rollout/accuracy"] = fmean(map(float, correct))
    if replaced is not None:
        # what is kept is neither all right nor all wrong: its accuracy says little of the policy's
        judged_all = correct + [each for verdicts in replaced for each in verdicts if each is not None]
        metrics["rollout/replaced_groups"] = float(len(replaced))
        metrics["rollout/accuracy_with_replaced"] = fmean(map(float, judged_all)) if judged_all else 0.0
    metrics |= {f"agent/{name}": float(number) for name, number in agent.items()}
    return metrics | {f"rollout/dropped_{reason}": float(number) for reason, number in dropped.items() if number}


def length_error(samples: Sequence[SampleMeta], records: Mapping[str, GroupRecord]) -> dict[str, float]:
    """How far lengths were foretold amiss, over the groups of which they were: what the order of requests lives on.

    Args:
        samples: of a batch.
        records: by group.
    """
    lengths: dict[str, list[int]] = {}
    for sample in samples:
        lengths.setdefault(sample.group_id, []).append(sample.response_length)
    errors = [
        abs(foretold - fmean(lengths[group_id])) / fmean(lengths[group_id])
        for group_id, record in records.items()
        if (foretold := record.foretold_tokens) is not None
    ]
    return {"rollout/length_error": fmean(errors)} if errors else {}


def partial_metrics(under_way: Iterable[Sample]) -> dict[str, float]:
    """Of the samples that a batch leaves behind half generated."""
    unfinished = [sample for sample in under_way if sample.finish_reason is None]
    tokens = [len(sample.response_tokens) for sample in unfinished if sample.response_tokens]
    return {"rollout/partial_samples": float(len(tokens)), "rollout/partial_tokens": float(sum(tokens))}


def token_staleness(payloads: Iterable[SamplePayload], version: int) -> dict[str, float]:
    """`staleness/tokens_behind_N`: share of the sampled tokens that came from weights N versions before `version`, for
    each N that occurs."""
    return staleness_shares(tokens_by_version(payloads), version)


def staleness_shares(tokens: Mapping[int, int], version: int) -> dict[str, float]:
    """As `token_staleness`, of so many tokens of each version."""
    count = sum(tokens.values())
    return {f"staleness/tokens_behind_{version - each}": tokens[each] / count for each in sorted(tokens, reverse=True)}


def tokens_by_version(payloads: Iterable[SamplePayload]) -> Counter[int]:
    """Sampled tokens, by the version that they came from."""
    tokens: Counter[int] = Counter()
    for payload in payloads:
        found, counts = np.unique(np.frombuffer(payload.versions, "<i4"), return_counts=True)
        tokens.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
    tokens.pop(OBSERVED_VERSION, None)
    return tokens


def _cached_fraction(groups: Sequence[GroupRecord]) -> float:
    prompts = sum(group.prompt_tokens for group in groups)
    return sum(group.cached_tokens for group in groups) / prompts if prompts else 0.0


def _uniform_fraction(samples: Sequence[SampleMeta]) -> float:
    """Groups whose rewards are all equal: they give a group-relative advantage of zero, and no gradient."""
    rewards: dict[str, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group_id, set()).add(sample.reward)
    return fmean(float(len(of_group) == 1) for of_group in rewards.values())


def trace_groups(step: int, groups: Sequence[GroupRecord]) -> None:
    """Where the time of each group went, into the trace: generating its samples, then judging the last of them."""
    for group in groups:
        if group.started_s is not None and group.generated_s is not None and group.ready_s is not None:
            trace.add("generate", group.started_s, group.generated_s, "group", step)
            trace.add("reward", group.generated_s, group.ready_s, "reward", step)
