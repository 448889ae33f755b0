"""A scalar head in place of the output layer: the form of a reward model or a critic.

Flows in: a family's table. Flows out: the same with one more row of weights, and without the head. The names are those
of transformers' `…ForSequenceClassification` and of SGLang's models of it. Invariant: the trunk's rules are unchanged.
"""

from dataclasses import replace

from slimerl.resharding.families.blocks import replicated
from slimerl.resharding.families.table import Block, Table

SCORE = "score.weight"
"""In checkpoints and engines, and the parameter in Megatron's model of ours (`slimerl/training/value_model.py`)."""
_HEADS = frozenset({"lm_head.weight", "output_layer.weight"})


def with_score(table: Table) -> Table:
    """Of a tied model the embedding stays where the tokens come in alone. The prediction layer, which predicts tokens,
    is left out."""
    (embedding,) = table.first.weights
    last = table.last
    trunk = Block(
        weights=tuple(each for each in last.weights if each.name not in _HEADS),
        megatron=tuple(each for each in last.megatron if each.parameter not in _HEADS),
        engine=tuple(each for each in last.engine if each.parameter not in _HEADS),
    )
    head = replicated(SCORE, (1, embedding.shape[1]), SCORE)
    return replace(table, last=trunk + head, prediction=None, aliases={})
