"""The door for weights into a running engine: SGLang's custom weight loader `receive`, one call per message.

Flows in: a JSON message in a one-dimensional uint8 tensor (`resharding/transports/message.py` makes it).
Flows out: a report per tensor-parallel rank, JSON, into the `TCPStore` that the sender hosts.
Invariant: `receive` never raises, since SGLang's scheduler would end with it; whatever went wrong is in the report.

Messages (`op`):
- `describe`: name, shape, dtype and stride of every parameter, for checks before the first byte is written.
- `join`, `leave`: this rank becomes a member of the sender's process group, or ends that.
- `load`: the tensors of one bucket, from wherever (`sources.py`), go through the model's own `load_weights`.
- `patch`: changes to the weights that lie here, or whole boxes of them, straight into the parameters (`patch.py`).
- `open_shards`, `commit_shards`: a resident receiver (`receiver.py`) starts; what it has taken in is written into the
  live parameters, where that has not been done, and verified.
- `verify`: derived weights are rebuilt, padding is checked to be zero, and what now lies in the live parameters is
  digested: one number for what the rank holds of each tensor.
"""

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import TCPStore

from slimerl.engine.inside import patch
from slimerl.engine.inside.cuda_bucket import gpu_uuid, visible_gpus
from slimerl.engine.inside.digest import digest
from slimerl.engine.inside.receiver import open_receiver, the_receiver
from slimerl.engine.inside.sources import join_group, leave_group, read_source
from slimerl.engine.inside.store import KeptStore
from slimerl.engine.inside.watched import WriteLog
from slimerl.engine.inside.weight_group import GroupBroken

logger = logging.getLogger(__name__)
_the_store = KeptStore()

Message = dict[str, Any]
Report = dict[str, Any]

_MODULUS = 1 << 64
_SCALES_THAT_ARE_NO_WEIGHTS = ("attn_mqa.k_scale", "attn_mqa.v_scale", "attn_mha.k_scale", "attn_mha.v_scale")
"""Scalars that SGLang's attention layers of FP8 models register as parameters; no checkpoint has them."""


class LoadProblem(RuntimeError):
    """The model's own loader raised; the message says at which tensor."""


class UnplacedParameters(ValueError):
    """The plan and the live model do not have the same parameters."""


class DirtyPadding(ValueError):
    """Elements that belong to no tensor are not zero."""


def receive(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry: runs in each engine rank's scheduler, while generation stands still."""
    try:
        message: Message = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
        reply, rank = message["reply"], tensor_rank()
        sender = f"{reply['host']}:{reply['port']}"
    except Exception:
        # Nobody is known to report to: the sender misses the report, and names this engine.
        logger.exception("slimerl: this is no message, or the rank does not know its number")
        return
    report: Report
    try:
        with torch.no_grad():
            report = {"ok": True, **_OPERATIONS[message["op"]](model, message, rank)}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the sender takes the report as leave to reuse the bucket
    except GroupBroken as error:
        # Not this rank's fault: the sender finds out whose, and tries again without it.
        report = {"ok": True, "broken": str(error)}
    except Exception as error:
        logger.exception("slimerl: %s failed", message.get("op"))
        report = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    try:
        _answer(reply, rank, report)
    except Exception:
        # The sender is gone or does not answer: it will miss this report, and name this engine.
        logger.exception("slimerl: rank %d could not report to %s", rank, sender)


def tensor_rank() -> int:
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:  # SGLang before 0.5.20
        from sglang.srt.distributed import get_tensor_model_parallel_rank

        return get_tensor_model_parallel_rank()
    return get_parallel().tp_rank


def _answer(reply: Message, rank: int, report: Report) -> None:
    store = _store_of(reply)
    store.set(f"{reply['key']}/{rank}", json.dumps(report))


def _store_of(reply: Message) -> TCPStore:
    secret, _, _ = reply["key"].partition("/")
    return _the_store.at(reply["host"], reply["port"], secret, reply["timeout_s"])


def _describe(model: torch.nn.Module, _message: Message, _rank: int) -> Report:
    return {
        "parameters": {
            name: {
                "shape": list(parameter.shape),
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "stride": list(parameter.stride()),
            }
            for name, parameter in _weights(model).items()
        },
        "gpu": _gpu(model),
        "gpus": visible_gpus(),
        "holds": patch.held(),
    }


def _gpu(model: torch.nn.Module) -> str | None:
    """Identifies the rank's GPU over all machines; None without one."""
    device = next(model.parameters()).device
    return gpu_uuid(device) if device.type == "cuda" else None


def _join(_model: torch.nn.Module, message: Message, rank: int) -> Report:
    join_group(message["group"], message["first_rank"] + rank)
    return {}


def _leave(_model: torch.nn.Module, _message: Message, _rank: int) -> Report:
    leave_group()
    return {}


def _patch(model: torch.nn.Module, message: Message, _rank: int) -> Report:
    reply = message["reply"]
    return patch.receive_patch(_weights(model), message, _store_of(reply))


def _load(model: torch.nn.Module, message: Message, _rank: int) -> Report:
    patch.forget()
    log = WriteLog()

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        try:
            model.load_weights(log.watch(tensors))  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - raised again below, without its traceback
            # The frames of a traceback would keep pointing into the bucket.
            traceback.clear_frames(error.__traceback__)
            problem = f"{log.reading}: {type(error).__name__}: {error}"
        else:
            return
        raise LoadProblem(problem)

    read_source(message["source"], message["entries"], load)
    sent = {entry["name"] for entry in message["entries"]}
    return {"ignored": sorted(sent - log.written), "converted": sorted(log.converted)}


def _verify(model: torch.nn.Module, message: Message, rank: int) -> Report:
    rebuild_derived = getattr(model, "post_load_weights", None)
    if rebuild_derived is not None:  # SGLang's end_weight_update leaves this out after a custom loader
        rebuild_derived()
    weights = _weights(model)
    placed = {placement["parameter"] for placement in message["placements"]}
    if placed != weights.keys():
        raise UnplacedParameters(
            f"in the engine but not in the plan: {sorted(weights.keys() - placed)}; "
            f"in the plan but not in the engine: {sorted(placed - weights.keys())}"
        )
    digests: dict[str, int] = {}
    for placement in message["placements"]:
        part = _placed(weights[placement["parameter"]], placement)
        name = placement["tensor"]
        if name:
            value = digest(part, name, placement["shape"], placement["box"], placement["granule"])
            digests[name] = (digests.get(name, 0) + value) % _MODULUS
        elif part.any():
            raise DirtyPadding(f"{placement['parameter']}: the padding at {placement['at']} is not zero")
    logger.info("slimerl: version %s: %d tensors of rank %d digested", message["version"], len(digests), rank)
    patch.remember(message["version"], digests)
    return {"digests": digests}


def _open_shards(model: torch.nn.Module, message: Message, rank: int) -> Report:
    open_receiver(model, message, rank)
    return _describe(model, message, rank)


def _commit_shards(model: torch.nn.Module, message: Message, rank: int) -> Report:
    patch.forget()
    begun = time.monotonic()
    receiver = the_receiver()
    written = receiver.commit(message["transfer"], _weights(model))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    copied = time.monotonic()
    report = _verify(model, {**message, "placements": receiver.placements}, rank)
    seconds = {"copy_s": copied - begun, "digest_s": time.monotonic() - copied}
    return {**report, **seconds, "written_bytes": written}


def _placed(parameter: torch.Tensor, placement: Message) -> torch.Tensor:
    """The placed elements, in the shape of their box."""
    starts, stops = placement["box"]
    at = tuple(slice(start, stop) for start, stop in zip(*placement["at"], strict=True))
    return parameter[at].view([stop - start for start, stop in zip(starts, stops, strict=True)])


_OPERATIONS: dict[str, Callable[[torch.nn.Module, Message, int], Report]] = {
    "describe": _describe,
    "join": _join,
    "leave": _leave,
    "load": _load,
    "patch": _patch,
    "open_shards": _open_shards,
    "commit_shards": _commit_shards,
    "verify": _verify,
}


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint fills; a tied head is listed once, under its embedding."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.endswith(_SCALES_THAT_ARE_NO_WEIGHTS)
    }
