"""Rewards: what a response is worth, found where it can be killed.

`outcome.py` the three outcomes and the interface; `math.py` the rule; `pool.py` and `worker.py` the processes.
"""
