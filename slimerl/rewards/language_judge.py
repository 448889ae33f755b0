"""A language model as judge: it reads the response under a rubric and chooses a grade, several times.

Flows in: `RewardRequest`s with their prompts. Flows out: the mean of the votes' grades.
Invariants: each vote sees the grades in an order of its own (models prefer some places and letters), which the sample's
id and the vote's number determine; a vote that cannot be read is no grade; with fewer than half of the votes read there
is no reward but a failure.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase
from typing import Any

import msgspec
import xxhash

from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored
from slimerl.rewards.remote import RemoteFailure, RemoteScorer

CHAT_PATH = "/v1/chat/completions"
PLACEHOLDERS = frozenset({"prompt", "response", "answer"})
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_GRADE = re.compile(r"\bgrade\W{0,6}([A-Z])\b", re.IGNORECASE)


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]


@dataclass(frozen=True)
class LanguageJudge(RemoteScorer):
    """`remote.url` is that of the chat completions. `grades`: name → reward. Its events are
    `vote_unreadable` and `vote_REASON` beside those of the requests."""

    rubric: str
    model: str
    grades: Mapping[str, float]
    correct_from: float
    votes: int
    temperature: float
    max_new_tokens: int
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    async def score(self, request: RewardRequest) -> Outcome:
        votes = await asyncio.gather(*(self._vote(request, number) for number in range(self.votes)))
        read = [vote for vote in votes if isinstance(vote, float)]
        failures = [vote for vote in votes if isinstance(vote, Failed)]
        for failure in failures:
            self.remote.events[f"vote_{failure.reason}"] += 1
        if 2 * len(read) < self.votes or not read:
            first = next((each for each in failures if each.reason != "unreadable"), failures[0])
            return Failed(f"judge_{first.reason}", f"{len(read)} of {self.votes} votes could be read: {first.detail}")
        reward = fmean(read)
        return Scored(reward, reward > self.correct_from)

    async def _vote(self, request: RewardRequest, number: int) -> float | Failed:
        order = vote_order(list(self.grades), request.sample_id, number)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": judge_prompt(self.rubric, request, order)}],
            "temperature": self.temperature,
            "max_tokens": self.max_new_tokens,
            "seed": _hash(f"{request.sample_id}/{number}") & 0x7FFF_FFFF,
            **self.extra_body,
        }
        try:
            text = _text(await self.remote.post(body))
        except RemoteFailure as failure:
            return Failed(failure.reason, str(failure))
        grade = chosen(text, order)
        if grade is None:
            return Failed("unreadable", f"no grade in the judge's answer '{text[-200:]}'")
        return self.grades[grade]


def vote_order(grades: list[str], sample_id: str, vote: int) -> list[str]:
    """Consecutive votes of a sample begin with different grades, so that no grade is always first."""
    shuffled = sorted(grades, key=lambda grade: _hash(f"{sample_id}/{grade}"))
    start = vote % len(shuffled)
    return shuffled[start:] + shuffled[:start]


def judge_prompt(rubric: str, request: RewardRequest, order: list[str]) -> str:
    """The rubric, filled in at one go: braces in a response are no placeholders."""
    texts = {"prompt": request.prompt, "response": request.response, "answer": request.answer}
    filled = _PLACEHOLDER.sub(lambda match: texts.get(match[1], match[0]), rubric)
    choices = "\n".join(f"{letter}: {grade}" for letter, grade in zip(ascii_uppercase, order, strict=False))
    return f"{filled}\n\nThe grades to choose from:\n{choices}\n\nEnd with one line: Grade: LETTER"


def chosen(text: str, order: list[str]) -> str | None:
    """The grade that the judge named last, if it is one."""
    letters = _GRADE.findall(text)
    place = ascii_uppercase.find(letters[-1].upper()) if letters else len(order)
    return order[place] if place < len(order) else None


def rubric_fault(path: Path) -> str | None:
    """What makes the file useless as a rubric."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return f"{path} cannot be read: {error}"
    named = set(_PLACEHOLDER.findall(text))
    if "response" not in named:
        return f"{path} has no {{response}}: the judge would not see what it judges"
    unknown = sorted(named - PLACEHOLDERS)
    return f"{path} has {{{unknown[0]}}}, which nothing fills in; known are {sorted(PLACEHOLDERS)}" if unknown else None


def _text(body: bytes) -> str:
    """Empty where the model gave none (it was still thinking). Raises RemoteFailure."""
    try:
        completion = msgspec.json.decode(body, type=_Completion)
        return completion.choices[0].message.content or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        raise RemoteFailure(
            "garbled", f"not a chat completion: {error}: {body[:200].decode(errors='replace')}"
        ) from None


def _hash(text: str) -> int:
    return xxhash.xxh64_intdigest(text.encode())
