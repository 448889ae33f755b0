"""Which tokens of a response belong together. Pure.

Flows in: a sample. Flows out: its turns: runs of tokens that the policy sampled, each with what was observed behind it.
Invariant: the turns are a function of the sample's tokens and marks alone, the same before and after a restart.
"""

from dataclasses import dataclass
from itertools import groupby

from slimerl.samples.sample import Sample


@dataclass(frozen=True, slots=True)
class Turn:
    """Example: a calculator is asked and answers: `sampled` "calc(2*21)=" with its stop token, `observed` "42"."""

    sampled: tuple[int, ...]
    observed: tuple[int, ...]
    """Empty where nothing was observed yet."""


def turns_of(sample: Sample) -> list[Turn]:
    """The turns so far. What is observed before the first sampled token is of no turn; the last turn may be under
    way."""
    runs: list[tuple[bool, tuple[int, ...]]] = []
    start = 0
    for sampled, marks in groupby(sample.sampled):
        end = start + len(list(marks))
        runs.append((sampled, tuple(sample.response_tokens[start:end])))
        start = end
    turns = []
    for place, (sampled, tokens) in enumerate(runs):
        if sampled:
            turns.append(Turn(tokens, runs[place + 1][1] if place + 1 < len(runs) else ()))
    return turns


def seen_first(sample: Sample) -> tuple[int, ...]:
    """What was observed before the first sampled token."""
    count = sample.sampled.index(True) if True in sample.sampled else len(sample.sampled)
    return tuple(sample.response_tokens[:count])


def last_said(sample: Sample) -> list[int]:
    """What is judged of a response: the tokens that the policy sampled since it last observed something."""
    start = len(sample.sampled)
    while start and sample.sampled[start - 1]:
        start -= 1
    return sample.response_tokens[start:]
