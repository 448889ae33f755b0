"""Supervised fine-tuning: the negative log-likelihood of given responses, as an algorithm of the same trainer."""

from slimerl.algorithms.from_data import FromData
from slimerl.algorithms.terms import LossTerms, TokenBatch


class Sft(FromData):
    def loss(self, tokens: TokenBatch) -> LossTerms:
        return LossTerms(-tokens.policy_logprobs)
