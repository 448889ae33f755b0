"""Which tokens of a response belong together. Pure.

Flows in: a sample. Flows out: its turns: runs of tokens that the policy sampled, each with what was observed behind it.
Invariant: the turns are a function of the sample's tokens and marks alone, the same before and after a restart.
"""

from dataclasses import dataclass

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
    # Searched as bytes: a response may have tens of thousands of tokens, and this runs on the event loop.
    marks, tokens = bytes(sample.sampled), sample.response_tokens
    turns = []
    start = marks.find(1)
    while start >= 0:
        end = _or_end(marks.find(0, start), marks)
        following = marks.find(1, end)
        turns.append(Turn(tuple(tokens[start:end]), tuple(tokens[end : _or_end(following, marks)])))
        start = following
    return turns


def _or_end(found: int, marks: bytes) -> int:
    return found if found >= 0 else len(marks)


def seen_first(sample: Sample) -> tuple[int, ...]:
    """What was observed before the first sampled token."""
    marks = bytes(sample.sampled)
    return tuple(sample.response_tokens[: _or_end(marks.find(1), marks)])


def last_said(sample: Sample) -> list[int]:
    """What is judged of a response: the tokens that the policy sampled since it last observed something."""
    start = len(sample.sampled)
    while start and sample.sampled[start - 1]:
        start -= 1
    return sample.response_tokens[start:]
