"""Checkpoints from one format to the other: Hugging Face safetensors ↔ Megatron's distributed checkpoints.

    blueprint     which rows of which Hugging Face tensor lie where in Megatron's tensors, from the families' tables
    torch_format  the files of torch's distributed checkpoints: envelopes around raw bytes, and their index
    sources       tensors by Hugging Face name out of either format, some rows at a time
    targets       files of either format, planned to the byte before the first is written
    workplace     the half-finished directory: lock, journal of verified files, rename
    convert       the stream from source to target, in threads

Flows in: a checkpoint directory. Flows out: another one. Invariants: memory holds some rows per thread, whatever the
size of the model; a tensor's bytes are read back from the target under its Hugging Face name and have the digest of
the source before the target gets its name. No process group and no Megatron is needed.
"""
