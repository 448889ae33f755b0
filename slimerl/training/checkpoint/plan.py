"""What each rank writes of a checkpoint: Megatron's planning, cut where ranks wait for each other.

Flows in: the state as Megatron's tree. Flows out: a writer with this rank's buckets, and the index of all on rank 0.
Invariant: a function either waits for no other rank, or takes a failure of one rank to all of them; so whoever fails,
all can agree on it before the next one. Megatron's own strategy does neither.
"""

import io
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

from megatron_patches.checkpoint import no_process_for_results


def parts(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The sharded part, what all ranks have in common, and the latter as a file; waits for nobody."""
    sharded, common = save_preprocess(tree, validate_access_integrity=False)
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return sharded, common, buffer.getvalue()


def check(sharded: dict[str, Any], common: dict[str, Any]) -> None:
    """All ranks together hold every part once; rank 0 alone judges, at the end. Raises CheckpointingException."""
    validate_sharding_integrity(determine_global_metadata(sharded)[1], common_state_dict=common)


def in_torch_format(sharded: dict[str, Any]) -> dict[str, Any]:
    """The same tensors for torch's planner; waits for nobody."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(by_key, is_loading=False)


def planned(state: dict[str, Any], directory: Path) -> tuple[FileSystemWriterAsync, Any]:
    """The writer of this rank, one file each, and on rank 0 the index.

    Raises:
        torch.distributed.checkpoint.CheckpointException: some rank failed; on every rank.
    """
    writer = FileSystemWriterAsync(directory, thread_count=1)
    # the decentralised way is the one in which ranks wait for a rank that has failed
    planner = MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, can_run_decentralized_global_plan=False
    )
    with no_process_for_results():
        (_, index, _), *_ = save_state_dict_async_plan(state, writer, None, 0, planner=planner)
    return writer, index
