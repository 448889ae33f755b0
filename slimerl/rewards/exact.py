"""The exact rule: the response is the row's answer, character by character but for space around both.

For answers whose form is part of the task: math-verify takes `57+68` for 125. Named in a spec as
`reward: {kind: function, function: "slimerl.rewards.exact:score"}`.
"""

from slimerl.rewards.outcome import Outcome, RewardRequest, Scored, Unparsable


def score(request: RewardRequest) -> Outcome:
    """1 where they are equal, else 0; an empty response holds no answer."""
    response = request.response.strip()
    if not response:
        return Unparsable()
    correct = response == request.answer.strip()
    return Scored(float(correct), correct, said=response)
