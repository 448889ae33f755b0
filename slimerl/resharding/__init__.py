"""Resharding: the same weights in the layouts of the checkpoint, the trainer and the engine.

Flows in: a model configuration, a Megatron layout, an engine layout. Flows out: placements (which box of which
Hugging Face tensor lies where in which parameter of which rank), and the copies, gathers and proofs made from them.
Invariant: one table per model family (`families/`) gives every direction; there is no second converter.
"""
