"""From a branch of a session to the sample that is trained. Pure.

Invariant: the sample has the branch's tokens in their order, each sampled one with the log-probability and version that
the engine gave; what the first turn was sampled from is its prompt, everything else that was observed is not sampled.
Of several branches that begin alike, one alone has the beginning as sampled: no token is trained twice.
"""

from collections.abc import Collection

from slimerl.engine.protocol import Generation
from slimerl.rollout.gateway.sessions import Turn
from slimerl.rollout.parts import append_generation
from slimerl.samples.sample import Sample


def branch_sample(
    turn: Turn, sample_id: str, group_id: str, prompt_id: str, elsewhere: Collection[Turn] = ()
) -> Sample:
    """The branch that ends with `turn`, complete. `elsewhere`: turns that are trained in another sample."""
    path = turn.path()
    sample = Sample(sample_id, group_id, prompt_id, tuple(path[0].observed))
    for number, each in enumerate(path):
        if number:
            sample.append(each.observed)
        if each in elsewhere:
            sample.append(each.tokens)
            continue
        append_generation(
            sample,
            Generation(list(each.tokens), list(each.logprobs), list(each.versions), each.finish_reason, {}, {}),
        )
    return sample
