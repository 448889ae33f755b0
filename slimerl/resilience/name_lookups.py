"""A name server that is slow or loses packets must not stall a step.

torch asks for the name of every peer that it connects to, only to put it into its messages, and the C library waits 5 s
for an answer that is lost before it asks again; measured behind a name server that loses one in a hundred: most of the
time of a weight sync.
"""

import os


def bounded_lookups() -> dict[str, str]:
    """Environment of a process that waits 1 s for an answer, twice, of each name server; a timeout that the user has
    set there stays. See resolv.conf(5)."""
    options = os.environ.get("RES_OPTIONS", "")
    return {"RES_OPTIONS": options if "timeout:" in options else f"{options} timeout:1 attempts:2".strip()}
