"""Found by every Python process of a run whose PYTHONPATH holds this directory: trainers write down what they fetch,
and commit the faults that they are told to."""

import json
import os
import sys

if "slimerl.training" in sys.orig_argv and (record := os.environ.get("SLIMERL_TEST_RECORD")):
    from slimerl.samples.sample import response_arrays
    from slimerl.training.rollout_client import RolloutClient

    fetch = RolloutClient.fetch

    def recorded(self, sample_ids):
        payloads = fetch(self, sample_ids)
        with open(record, "a") as file:
            for payload in payloads:
                line = {"id": payload.sample_id, "tokens": response_arrays(payload)["tokens"]}
                file.write(json.dumps(line) + "\n")
        return payloads

    RolloutClient.fetch = recorded

if "slimerl.training" in sys.orig_argv and (faults := os.environ.get("SLIMERL_TEST_FAULTS")):
    from breaker import commit

    commit(faults)
