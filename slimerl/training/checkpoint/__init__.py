"""Checkpoints: written beside the training, whole or not at all, and the newest whole one is where a run goes on.

    directory    names, manifests, verification, choice, removal: plain files, no Megatron
    content      what a checkpoint holds of model, optimizer, schedule and random numbers, for Megatron
    plan         what each rank writes of it
    write        the asynchronous, agreed write of one checkpoint
    checkpointer what the training loop uses
    resume       the choice of a checkpoint when the trainer starts
    start        the weights of one for a new run
    local        names and choice of those that lie on the nodes' own disks, more often than the shared ones
    local_write  the write of each rank's part of one
    local_copies of parts on other nodes
    local_tier   what the checkpointer uses of them
    local_resume which of them are whole, and their load

Invariant: a directory `step-N` is complete and was flushed to the disk before it got that name; a newer one never
costs an older one before that. There is no pointer to the latest: it is derived from the names, and proven by digests.
"""
