"""What happens between the tokens that a policy samples: nothing, tools, an environment, a program of the user's.

Flows in: a sample with its prompt. Flows out: the same sample with its response, sampled and observed tokens in turn.
Invariants: sampled tokens come from the policy handle alone; what a sample has is never changed, only continued, and
never tokenised again.
"""
