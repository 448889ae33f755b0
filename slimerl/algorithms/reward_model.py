"""Bradley–Terry reward model: the chosen answer of a pair shall score higher.

loss = -log σ(s_chosen - s_rejected - margin), s the score at the answer's last real token (padding has no tokens here).
Source: Bradley and Terry 1952; for language models arXiv 2203.02155, with margin Llama 2 (arXiv 2307.09288).
"""

from slimerl.algorithms.from_data import FromData
from slimerl.algorithms.preference import pair_count, preference_loss, spread_over_pairs
from slimerl.algorithms.sequences import sequences_of
from slimerl.algorithms.terms import LossTerms, Needs, ValueBatch, required_totals


class RewardModel(FromData):
    @property
    def needs(self) -> Needs:
        return Needs(sequences=True, pairs=True, scores=True)

    def value_loss(self, tokens: ValueBatch) -> LossTerms:
        sequences, totals = sequences_of(tokens, "reward_model"), required_totals(tokens.totals, "reward_model")
        scores = tokens.values[sequences.ends]
        chosen, rejected = scores.view(pair_count(sequences, "reward_model"), 2).unbind(1)
        lead = chosen - rejected
        wanted = lead - tokens.margins if tokens.margins is not None else lead
        seen = lead.detach().double()
        means = {"preference/accuracy": (seen > 0).to(seen.dtype), "preference/margin": seen}
        return LossTerms(
            spread_over_pairs(preference_loss(wanted), sequences, totals),
            {name: spread_over_pairs(values, sequences, totals) for name, values in means.items()},
        )
