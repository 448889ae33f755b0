"""Rewards: what a response is worth, found where it can be killed.

outcome          the three outcomes and the interface; `build` makes a reward from the spec
math, code, hooks   rules that run in worker processes (`pool`, `worker`); code's programs in `sandbox/`
exact, preference   functions to be named in a spec
reward_model     a model with a scalar head, in worker processes or on an SGLang server
http, language_judge   services, through `remote` with its circuit `breaker`
composite        the weighted sum of others
"""
