"""What no scheduler can be faster than. Pure.

Flows in: conversations and the engines' rates. Flows out: seconds.

Work: a decode step of b requests costs at least its share 1/slots of `step_s` per token, its own slope, and the reading
of its own KV; each token of a prompt that nobody had before is prefilled once. Chain: a conversation alone on an
engine, its turns one after the other. No schedule finishes before the longer of the two.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slimerl.simulation.rollout_engine import EngineRates
from slimerl.simulation.rollout_trace import Conversation, Oracle, oracle


@dataclass(frozen=True, slots=True)
class Bound:
    work_s: float
    """All engines at their best rate, all the time: the throughput bound."""
    chain_s: float
    """The longest conversation."""

    @property
    def makespan_s(self) -> float:
        return max(self.work_s, self.chain_s)


def bound(conversations: Sequence[Conversation], rates: EngineRates, engines: int) -> Bound:
    """The bounds for these conversations on so many engines."""
    work = chain = 0.0
    for one in conversations:
        decode, alone = _decode_s(one, rates)
        work += decode
        chain = max(chain, alone)
    missing: Oracle = oracle(conversations)
    work += missing.missing_tokens / rates.prefill_tokens_per_s
    return Bound(work / engines, chain)


def _decode_s(one: Conversation, rates: EngineRates) -> tuple[float, float]:
    """(engine seconds at full batch, seconds alone on an engine) of one conversation's answers.

    Alone it also pays for each turn's prefill; not for that of its opening, which a sibling may have paid.
    """
    context = sum(segment.length for segment in one.opening)
    full = alone = 0.0
    for turn in one.turns:
        new = turn.observation.length if turn.observation is not None else 0
        context += new
        read = _sum_from(context, turn.answer) * rates.step_per_kv_token_s
        full += turn.answer * (rates.step_s / rates.slots + rates.step_per_request_s) + read
        alone += turn.answer * (rates.step_s + rates.step_per_request_s) + read
        alone += rates.step_s + new / rates.prefill_tokens_per_s
        context += turn.answer
    return full, alone


def _sum_from(first: int, count: int) -> float:
    """first + (first + 1) + ... of `count` numbers."""
    return count * first + count * (count - 1) / 2


def answer_tokens(conversations: Iterable[Conversation]) -> int:
    return sum(one.answer_tokens for one in conversations)
