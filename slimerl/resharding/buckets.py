"""Buckets: the tensors of a transfer in pieces of bounded size.

Flows in: logical tensors in order, the groups that an engine fuses. Flows out: lists of tensors.
Invariant: each tensor is in one bucket, a fused group in one and the same; a bucket exceeds the bound only
where a single tensor or group does.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from slimerl.resharding.coverage import CoverageError, some_names
from slimerl.resharding.tensors import LogicalTensor

ALIGNMENT_BYTES = 64
"""A tensor's place in a flat buffer begins at a multiple of this: a cache line, and more than any dtype needs."""


def split_into_buckets(
    tensors: Sequence[LogicalTensor], fused_groups: Iterable[Sequence[str]], bucket_bytes: int
) -> list[list[LogicalTensor]]:
    """Fill buckets of at most `bucket_bytes` in the order of `tensors`; a group travels where its first member stands.

    Raises:
        CoverageError: no tensors at all, a name twice, or a group with a name that is no tensor or in two groups.
    """
    buckets: list[list[LogicalTensor]] = []
    size = 0
    for group in _groups_in_order(tensors, fused_groups):
        group_bytes = sum(aligned(tensor.nbytes) for tensor in group)
        if not buckets or size + group_bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].extend(group)
        size += group_bytes
    return buckets


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next tensor of a bucket begins."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bucket_offsets(bucket: Sequence[LogicalTensor]) -> tuple[list[int], int]:
    """Where each tensor begins in a flat buffer, and the buffer's size, in bytes."""
    offsets, end = [], 0
    for tensor in bucket:
        offsets.append(end)
        end += aligned(tensor.nbytes)
    return offsets, end


def _groups_in_order(
    tensors: Sequence[LogicalTensor], fused_groups: Iterable[Sequence[str]]
) -> list[list[LogicalTensor]]:
    by_name = {tensor.name: tensor for tensor in tensors}
    if not tensors:
        raise CoverageError("there are no tensors to send")
    if len(by_name) != len(tensors):
        counts = Counter(tensor.name for tensor in tensors)
        raise CoverageError(f"tensors appear twice: {some_names(name for name in counts if counts[name] > 1)}")
    group_of: dict[str, Sequence[str]] = {}
    for group in fused_groups:
        # Not with set operations: those would look at all names for each group.
        if unknown := [name for name in group if name not in by_name]:
            raise CoverageError(f"a fused group has names that are no tensors: {some_names(unknown)}")
        if shared := [name for name in group if name in group_of]:
            raise CoverageError(f"tensors are in two fused groups: {some_names(shared)}")
        group_of.update(dict.fromkeys(group, group))
    done: set[str] = set()
    ordered = []
    for tensor in tensors:
        if tensor.name not in done:
            names = group_of.get(tensor.name, (tensor.name,))
            ordered.append([by_name[name] for name in names])
            done.update(names)
    return ordered
