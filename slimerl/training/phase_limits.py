"""How long each phase of the trainer may take without a sign of progress. Pure.

A phase that waits for others has the deadline of that wait, and `deadlines.stall_s` beyond: who waits is to give up
first, with its own message. The rest beats once a micro-batch.
"""

from slimerl.spec.survival import DeadlineSpec

BETWEEN = "between two phases"


def phase_limits(deadlines: DeadlineSpec) -> dict[str, float]:
    """Seconds by the phase's name; one that is not named has `deadlines.stall_s`."""
    waits = {
        "start": deadlines.start_s,
        "begin anew": deadlines.request_s + deadlines.start_s,
        "wait for room": deadlines.start_s,
        "build": deadlines.checkpoint_s,
        "resume": deadlines.checkpoint_s,
        "wait": deadlines.batch_s,
        "fetch": deadlines.request_s,
        # the engines may have to start first
        "sync": deadlines.start_s + deadlines.sync_s,
        "hand over": deadlines.batch_s + deadlines.sync_s,
        "evaluate": deadlines.batch_s,
        "checkpoint": deadlines.checkpoint_s,
        "export": deadlines.checkpoint_s,
    }
    return {phase: seconds + deadlines.stall_s for phase, seconds in waits.items()}
