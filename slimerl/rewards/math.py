"""The math rule: the response's last boxed or plain expression against the row's answer, by math-verify.

Runs in a worker process. Comparing two expressions can take for ever (`9^{9^{9^{9}}}`) or any amount of memory: the
worker is killed from outside. math-verify's own time limits are alarms in the main thread, and are switched off.
"""

import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored, Unparsable

# It warns once that its time limits are off, which is meant.
logging.getLogger("math_verify").setLevel(logging.ERROR)

SAID_CHARACTERS = 200
"""Of an answer, for telling it from others."""
_EXPRESSIONS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
"""Boxed expressions first, then "the answer is …", then the last expression of the text."""


def score(request: RewardRequest) -> Outcome:
    """1 for a response equal to the answer, else 0; `Failed("bad_answer")` where the row's answer is no expression."""
    # Inside a box the whole answer is one expression, whether the data set writes it as LaTeX or not.
    gold = _expressions(f"\\boxed{{{request.answer}}}")
    if not gold:
        return Failed("bad_answer", f"the data's answer '{request.answer}' is not a mathematical expression")
    found = _expressions(request.response)
    if not found:
        return Unparsable()
    correct = bool(verify(gold, found, timeout_seconds=None))
    return Scored(reward=float(correct), correct=correct, said=str(found[-1])[:SAID_CHARACTERS])


def _expressions(text: str) -> list:
    return parse(text, extraction_config=_EXPRESSIONS, parsing_timeout=None)
