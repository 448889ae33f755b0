"""Samples that agent loops fork, over a restart. Pure.

Flows in: a group as a checkpoint has it. Flows out: the same without the forks that were not finished, and what these
have: their loops fork them again, and go on with it.
"""

import msgspec

from slimerl.samples.messages import SavedGroup
from slimerl.samples.sample import FORK, Sample


def without_forks(group: SavedGroup) -> tuple[SavedGroup, dict[str, Sample]]:
    unfinished = {sample_id for sample_id in group.missing if FORK in sample_id.removeprefix(group.group_id)}
    begun = {each.payload.sample_id: each for each in group.begun}
    kept = msgspec.structs.replace(
        group,
        sample_ids=[sample_id for sample_id in group.sample_ids if sample_id not in unfinished],
        begun=[each for sample_id, each in begun.items() if sample_id not in unfinished],
    )
    return kept, {name: Sample.restored(begun[name], group.group_id) for name in unfinished & begun.keys()}
