"""Which tensors a model's loader really wrote, through all that loaders do with them on the way."""

import threading

import torch

from slimerl.engine.inside.watched import WriteLog


def watched(log: WriteLog, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(log.watch(tensors.items()))


def test_a_tensor_that_is_copied_into_a_parameter_counts_as_written_and_one_that_is_ignored_does_not() -> None:
    log, parameter = WriteLog(), torch.nn.Parameter(torch.zeros(4, 4))
    sent = watched(log, used=torch.ones(4, 4), ignored=torch.ones(4, 4))
    parameter.data.copy_(sent["used"])
    assert torch.equal(parameter.data, torch.ones(4, 4))
    assert log.written == {"used"}


def test_slices_casts_and_concatenations_keep_their_origin() -> None:
    log, target = WriteLog(), torch.zeros(6, 4)
    sent = watched(log, a=torch.ones(8, 4), b=torch.full((2, 4), 2.0), c=torch.full((4, 6), 3.0))
    target[:4].copy_(sent["a"].narrow(0, 4, 4))
    target[2:].copy_(torch.cat([sent["b"], sent["b"]]))
    target[0] = sent["c"].t()[0].double().float()[:4]
    assert log.written == {"a", "b", "c"}
    assert target.tolist() == [[3.0] * 4, [1.0] * 4, *[[2.0] * 4] * 4]


def test_a_loader_that_copies_in_threads_is_seen() -> None:
    """DeepSeek's loader hands its copies to a thread pool."""
    log, target = WriteLog(), torch.zeros(4)
    sent = watched(log, a=torch.ones(4))
    thread = threading.Thread(target=lambda: target.copy_(sent["a"]))
    thread.start()
    thread.join()
    assert log.written == {"a"}


def test_w2_a_conversion_on_the_way_is_noted_with_both_dtypes() -> None:
    log = WriteLog()
    sent = watched(log, a=torch.ones(4, dtype=torch.bfloat16), b=torch.ones(4, dtype=torch.bfloat16))
    torch.zeros(4).copy_(sent["a"])
    torch.zeros(4).copy_(sent["b"].float())
    assert log.converted == {("a", "bfloat16", "float32"), ("b", "bfloat16", "float32")}


def test_the_tensor_at_which_a_loader_stopped_is_named() -> None:
    log = WriteLog()
    for name, _ in log.watch([("first", torch.ones(1)), ("second", torch.ones(1))]):
        if name == "second":
            break
    assert log.reading == "second"
