"""An engine's answer with the routed experts that it was asked for.

Flows in: the answer as it came. Flows out: the answer with rows that can be appended to a sample.
Invariant: what was asked for is there, or is missing for a reason; a record is never silently left out.
"""

import asyncio

import msgspec

from slimerl.engine.protocol import Generation
from slimerl.engine.routed_experts import FIELD, RoutedExpertsError, read_routed_experts

LONG = 1_000_000
"""Characters of a record that is decoded in another thread."""


async def with_routing(generation: Generation, first: int | None, input_tokens: int) -> Generation:
    """With the record of the tokens from place `first` on; None: none was asked for.

    Raises:
        RoutedExpertsError: it is missing though the request was not cut off, or is not of these tokens.
    """
    if first is None or not generation.tokens:
        return generation
    count = input_tokens + len(generation.tokens)
    if len(generation.meta.get(FIELD) or "") > LONG:
        routing = await asyncio.to_thread(read_routed_experts, generation.meta, first, count)
    else:
        routing = read_routed_experts(generation.meta, first, count)
    if routing is None and generation.finish_reason != "abort" and first < count - 1:
        raise RoutedExpertsError(
            "it reports no routed experts; was the engine started with --enable-return-routed-experts?"
        )
    meta = {key: value for key, value in generation.meta.items() if key != FIELD}
    return msgspec.structs.replace(generation, meta=meta, routing=routing)
