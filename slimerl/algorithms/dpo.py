"""DPO: the policy's own likelihoods as the reward model of pairs.

loss = -log σ(β·[Σ_t Δ(chosen) - Σ_t Δ(rejected)]), Δ = log π_θ - log π_ref, *sums* over the response's tokens.
Source: Rafailov et al., arXiv 2305.18290.
"""

from slimerl.algorithms.from_data import FromData
from slimerl.algorithms.preference import pair_count, preference_loss, spread_over_pairs
from slimerl.algorithms.sequences import sequences_of
from slimerl.algorithms.terms import LossTerms, Needs, TokenBatch, required, required_totals


class Dpo(FromData):
    @property
    def needs(self) -> Needs:
        return Needs(sequences=True, reference=True, pairs=True)

    def loss(self, tokens: TokenBatch) -> LossTerms:
        sequences, totals = sequences_of(tokens, "dpo"), required_totals(tokens.totals, "dpo")
        reference = required(tokens.reference_logprobs, "reference_logprobs", "dpo")
        sums = sequences.sums(tokens.policy_logprobs - reference.detach())
        chosen, rejected = sums.view(pair_count(sequences, "dpo"), 2).unbind(1)
        margins = self.spec.dpo_beta * (chosen - rejected)
        seen = margins.detach().double()
        means = {"preference/accuracy": (seen > 0).to(seen.dtype), "preference/margin": seen}
        return LossTerms(
            spread_over_pairs(preference_loss(margins), sequences, totals),
            {name: spread_over_pairs(values, sequences, totals) for name, values in means.items()},
        )
