"""Found by every Python process of a run under fire whose PYTHONPATH holds this directory: trainer ranks commit the
faults that appear as files in the directory `SLIMERL_CHAOS`, each once.

    dropped   the answer of the rollout role to a call is lost, though the role has done what it was asked
    delayed   an answer comes late
    spoilt    the advantage of a sample is no number, and so the gradient is none
"""

import os
import sys
import time
from pathlib import Path

DELAY_S = 3.0

if "slimerl.training" in sys.orig_argv and "SLIMERL_CHAOS" in os.environ:
    from dataclasses import replace

    from slimerl.samples.messages import Path as Endpoint
    from slimerl.samples.messages import SamplePayload
    from slimerl.training.rollout_client import NOT_TWICE, REPEATED, RoleGone, RolloutClient
    from slimerl.training.training_sample import TrainingSample

    ask, read = RolloutClient._once, TrainingSample.from_payload

    def taken(name: str) -> bool:
        try:
            Path(os.environ["SLIMERL_CHAOS"], name).unlink()
        except FileNotFoundError:
            return False
        return True

    def asked(self: RolloutClient, method: str, path: Endpoint, body: bytes, timeout_s: float) -> bytes:
        answer = ask(self, method, path, body, timeout_s)
        if path not in REPEATED or path in NOT_TWICE:
            return answer
        if taken("delayed"):
            time.sleep(DELAY_S)
        if taken("dropped"):
            raise RoleGone(f"{path}: the connection was dropped")
        return answer

    def from_payload(payload: SamplePayload, advantage: float) -> TrainingSample:
        sample = read(payload, advantage)
        return replace(sample, advantage=float("nan")) if taken("spoilt") else sample

    setattr(RolloutClient, "_once", asked)  # noqa: B010 - not where a type checker would look for it
    setattr(TrainingSample, "from_payload", staticmethod(from_payload))  # noqa: B010
