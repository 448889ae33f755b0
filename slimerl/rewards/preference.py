"""The preference rule, for training a generative reward model: does a judgement score the best answer highest?

A judgement may say anything, principles and critique, and ends with an integer for each answer, in brackets:
`… [7, 4]`. The row's answer says which is the best of how many: `1 of 2`. Named in a spec as
`reward: {kind: function, function: "slimerl.rewards.preference:score"}`.

Only the order of the scores counts (DeepSeek-GRM, arXiv 2504.02495): what they are worth is the judge's own. A
judgement whose scores cannot be read is unparsable, and says of no answer that it is bad.
"""

import re

from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored, Unparsable

TIE = "tie"
_SCORES = re.compile(r"\[\s*(\d{1,4}(?:\s*,\s*\d{1,4})*)\s*\]\s*$")
_BEST = re.compile(r"\s*(\d{1,4}) of (\d{1,4})\s*")


def score(request: RewardRequest) -> Outcome:
    """1 where the best answer alone has the highest score, else 0; `said` is the number of the answer that has, or
    `TIE`. Without a score for each answer it is unparsable; `Failed("bad_answer")` where the row names no best one."""
    best = _BEST.fullmatch(request.answer)
    if best is None or not 1 <= int(best[1]) <= int(best[2]):
        return Failed(
            "bad_answer", f"the data's answer '{request.answer}' does not say which is best, as '1 of 2' does"
        )
    scores = scores_of(request.response)
    if scores is None or len(scores) != int(best[2]):
        return Unparsable()
    leaders = [number for number, each in enumerate(scores, 1) if each == max(scores)]
    if len(leaders) > 1:
        return Scored(0.0, False, TIE, TIE)
    correct = leaders == [int(best[1])]
    return Scored(float(correct), correct, said=str(leaders[0]))


def scores_of(judgement: str) -> list[int] | None:
    """The integers in brackets at its end, one for each answer; None: there are none."""
    found = _SCORES.search(judgement)
    return [int(each) for each in found[1].split(",")] if found else None
