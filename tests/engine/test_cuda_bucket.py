"""Buckets in device memory, as far as they can be tested without a device; the round trip is in tests/gpu."""

import base64
import json

import pytest
import torch
from torch.multiprocessing import reductions

from slimerl.engine.inside import cuda_bucket
from slimerl.engine.inside.packed import BucketError

UUIDS = ["11111111-0000", "22222222-0000"]


def test_a_gpu_is_found_by_its_uuid_whatever_its_number_in_the_senders_process() -> None:
    assert cuda_bucket.local_index(UUIDS[0], UUIDS) == 0
    assert cuda_bucket.local_index(UUIDS[0], UUIDS[::-1]) == 1


def test_a_gpu_that_the_engine_does_not_see_is_named_with_those_that_it_sees() -> None:
    with pytest.raises(BucketError, match="22222222-0000 is not visible here; visible are 11111111-0000"):
        cuda_bucket.local_index(UUIDS[1], UUIDS[:1])
    with pytest.raises(BucketError, match="visible are none"):
        cuda_bucket.local_index(UUIDS[1], [])


def test_what_torch_gives_for_an_allocation_comes_back_through_json_with_the_readers_device() -> None:
    """The order of torch's own tuple, which is not documented: as its `rebuild_cuda_tensor` names it."""
    names = list(reductions.rebuild_cuda_tensor.__code__.co_varnames[:15])
    given = {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([100]),
        "tensor_stride": (1,),
        "tensor_offset": 3,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": 0,
        "storage_handle": b"\x00handle\xff",
        "storage_size_bytes": 103,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"counter",
        "ref_counter_offset": 7,
        "event_handle": b"event",
        "event_sync_required": True,
    }
    assert list(given) == names
    wire = json.loads(json.dumps(cuda_bucket._to_json(tuple(given.values()))))
    assert base64.b64decode(wire["storage_handle"]) == b"\x00handle\xff"
    found = dict(zip(names, cuda_bucket._from_json(wire, 100, device=5), strict=True))
    assert found == given | {"storage_device": 5}


def test_weights_in_host_memory_go_through_host_memory_and_the_reason_is_given() -> None:
    assert cuda_bucket.why_not_on_device(torch.device("cpu"), {}) == "the weights lie on cpu"


def test_an_engine_rank_that_does_not_see_the_senders_gpu_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_bucket, "gpu_uuid", lambda _device: UUIDS[1])
    device = torch.device("cuda", 0)
    assert cuda_bucket.why_not_on_device(device, {"engine-0": [UUIDS, UUIDS[::-1]]}) is None
    reason = cuda_bucket.why_not_on_device(device, {"engine-0": [UUIDS], "engine-1": [UUIDS, UUIDS[:1]]})
    assert reason is not None
    assert "engine-1 rank 1 sees GPUs 11111111-0000, but not the sender's 22222222-0000" in reason
    assert "sees no GPU" in str(cuda_bucket.why_not_on_device(device, {"engine-0": [[]]}))
