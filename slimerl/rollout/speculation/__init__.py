"""Speculative rollouts: what siblings and the previous epoch answered is a draft of what a sample will answer.

A draft is scored in one pass of an engine (`scoring.py`), as much of it is kept as the tier's rule allows (`rules.py`,
`coupled.py`), and the engine goes on behind it (`dispatcher.py`). Where drafts come from: `drafts.py`; what a restart
has of them: `drafts_file.py`; what it all brought: `figures.py`.
"""
