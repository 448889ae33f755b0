"""Patches: what a sender that knows an engine rank's weights sends of a new version of them.

Flows in: a patch, fetched from the sender's store, the rank's parameters. Flows out: the parameters, changed in place,
or a reason why not. A patch has *parts*, each of which says where in which parameter it lies and what it does there:
`steps` changes some elements (`delta.py`), `whole` rewrites all, `zero` clears padding.

Invariants: steps are added only to the very weights that they were computed from: this rank remembers what it was last
proven to hold (`Base`: a version, and the digest of everything), until anything is written. A patch of another base,
one that comes without those before it, or whose bytes are not those that were sent, writes nothing and is refused; the
sender then rewrites the rank as a whole.
"""

import hashlib
import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypedDict

import torch
import zstandard
from torch.distributed import TCPStore

from slimerl.engine.inside.delta import DeltaError, apply, decode, integers_of
from slimerl.engine.inside.packed import BucketError, aligned

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""A store takes no more than 8 MiB at once."""
_MODULUS = 1 << 64
_LENGTH = struct.Struct("<Q")


class Base(TypedDict):
    """What lies in all parameters of a rank."""

    version: int
    digest: int


class Part(TypedDict):
    """A box of a parameter."""

    parameter: str
    at: list[list[int]]
    """Starts and stops in the parameter."""
    shape: list[int]
    """Of the box; `at` may have leading dimensions of one element more."""
    dtype: str
    form: str
    """`steps`, `whole` or `zero`."""
    nbytes: int
    """Of its body in the patch."""


class Parcel(TypedDict):
    """Where a patch lies in the sender's store, in pieces, and the SHA-256 of all of it."""

    keys: list[str]
    nbytes: int
    sha256: str


Body = bytes | memoryview


class _Rank:
    """What this process knows of its own weights."""

    def __init__(self) -> None:
        self.held: Base | None = None
        """None: they were written to since they were last digested."""
        self.patching: tuple[str, int] | None = None
        """Session of the update under way, and how many of its patches were applied."""


_rank = _Rank()


def held() -> Base | None:
    return _rank.held


def forget() -> None:
    """Something writes to the parameters."""
    _rank.held = _rank.patching = None


def remember(version: int, digests: Mapping[str, int]) -> None:
    """All parameters were digested, tensor by tensor."""
    _rank.held, _rank.patching = base_of(version, digests), None


def base_of(version: int, digests: Mapping[str, int]) -> Base:
    return {"version": version, "digest": sum(digests.values()) % _MODULUS}


def pack_patch(parts: Sequence[tuple[Part, Body]]) -> bytearray:
    """The parts and their bodies in one piece; bodies of whole parts are aligned."""
    table = zstandard.ZstdCompressor(level=1).compress(json.dumps([part for part, _ in parts]).encode())
    starts, end = [], aligned(_LENGTH.size + len(table))
    for part, body in parts:
        end = aligned(end) if part["form"] == "whole" else end
        starts.append(end)
        end += len(body)
    packed = bytearray(end)
    packed[: _LENGTH.size] = _LENGTH.pack(len(table))
    packed[_LENGTH.size : _LENGTH.size + len(table)] = table
    for start, (_, body) in zip(starts, parts, strict=True):
        packed[start : start + len(body)] = body
    return packed


def unpack_patch(packed: bytearray) -> Iterator[tuple[Part, memoryview]]:
    """What `pack_patch` was given; bodies in place."""
    (length,) = _LENGTH.unpack_from(packed)
    end = _LENGTH.size + length
    parts: list[Part] = json.loads(zstandard.ZstdDecompressor().decompress(bytes(packed[_LENGTH.size : end])))
    end = aligned(end)
    for part in parts:
        end = aligned(end) if part["form"] == "whole" else end
        yield part, memoryview(packed)[end : end + part["nbytes"]]
        end += part["nbytes"]


def receive_patch(
    parameters: Mapping[str, torch.Tensor], message: Mapping[str, Any], store: TCPStore
) -> dict[str, Any]:
    """Apply one patch of an update.

    Args:
        message: `session` and `number` of the patch in it; `base`, None for one that rewrites; `parcel`.

    Returns:
        `refused`: why nothing was written, if so.

    Raises:
        BucketError, DeltaError: the patch does not fit the parameters; some may have been written.
    """
    refusal = _refusal(message)
    packed = bytearray()
    if refusal is None:
        packed = _fetch(message["parcel"], store)
        refusal = _damage(message["parcel"], packed)
    # From here on nobody may take the weights for those of a version, nor a later patch for the next one.
    forget()
    if refusal is not None:
        refusal = f"patch {message['number']}: {refusal}"
        logger.warning("slimerl: refused: %s", refusal)
        return {"refused": refusal}
    for part, body in unpack_patch(packed):
        apply_part(parameters, part, body)
    _rank.patching = message["session"], message["number"] + 1
    return {}


def _refusal(message: Mapping[str, Any]) -> str | None:
    base, here = message["base"], _rank.held
    if base is None:
        return None
    if message["number"] == 0:
        return None if here == base else f"it changes {_named(base)}, but here lies {_named(here)}"
    expected = message["session"], message["number"]
    return None if _rank.patching == expected else "those before it were not all applied"


def _named(base: Base | None) -> str:
    return "no proven version" if base is None else f"version {base['version']} (digest {base['digest']:016x})"


def _fetch(parcel: Parcel, store: TCPStore) -> bytearray:
    packed = bytearray()
    for key in parcel["keys"]:
        packed += store.get(key)
    return packed


def _damage(parcel: Parcel, packed: bytearray) -> str | None:
    if len(packed) != parcel["nbytes"]:
        return f"{len(packed)} of its {parcel['nbytes']} bytes came"
    if hashlib.sha256(packed).hexdigest() != parcel["sha256"]:
        return "its bytes are not those that were sent (SHA-256)"
    return None


def apply_part(parameters: Mapping[str, torch.Tensor], part: Part, body: memoryview) -> None:
    name = part["parameter"]
    parameter = parameters.get(name)
    if parameter is None:
        raise BucketError(f"a patch is for {name}, which the model does not have")
    index = tuple(slice(start, stop) for start, stop in zip(*part["at"], strict=True))
    target = parameter[index].view(part["shape"])
    numel = prod(part["shape"])
    if part["form"] == "zero":
        target.zero_()
        return
    if str(parameter.dtype) != f"torch.{part['dtype']}":
        raise BucketError(f"a patch is for {name} in {part['dtype']}, it is kept in {parameter.dtype}")
    if part["form"] == "whole":
        if len(body) != numel * target.element_size():
            raise BucketError(f"{name}: {len(body)} bytes for {numel} elements of {part['dtype']}")
        if numel:
            integers = integers_of(target)
            integers.copy_(torch.frombuffer(body, dtype=integers.dtype).view(part["shape"]))
    else:
        try:
            apply(decode(body, target.element_size(), numel), target)
        except DeltaError as error:
            raise BucketError(f"{name}: {error}") from None
