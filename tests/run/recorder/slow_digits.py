"""A reward whose answers come late, each as late as its sample's id says."""

import time
import zlib

from slimerl.rewards.outcome import RewardRequest, Scored

LONGEST_S = 0.6


def score(request: RewardRequest) -> Scored:
    time.sleep(LONGEST_S * zlib.crc32(request.sample_id.encode()) / 2**32)
    right = request.response.strip() == request.answer
    return Scored(float(right), right)
