"""Frames between the rewards pool and a worker: four bytes of length (big-endian), then msgpack."""

import asyncio
import socket
from typing import Any, TypeVar

import msgspec

from slimerl.rewards.outcome import Outcome, RewardRequest

MAX_FRAME_BYTES = 16 * 2**20
"""A longer frame is garbage: the longest response is a few hundred thousand characters."""

Message = TypeVar("Message")


class Task(msgspec.Struct, frozen=True):
    number: int
    request: RewardRequest | bytes
    """Bytes: a call, whose meaning the worker's scorer knows."""


class Job(msgspec.Struct, frozen=True):
    """What a worker is for, told at its start. `scorer`: `package.module:function`, the scorer itself, or with
    `options` what makes it from them. `starts_programs`: its scorer starts processes, and sees to their limits and
    their end."""

    scorer: str
    memory_bytes: int
    options: dict[str, Any] | None = None
    starts_programs: bool = False


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """What a call came to; `body` means what its scorer says."""

    body: bytes


class Ready(msgspec.Struct, frozen=True):
    """First frame of a worker: it can score, or (with an error) never will."""

    error: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """Answer to the task of the same number. `retire`: the worker is not fit for another task."""

    number: int
    outcome: Outcome | Reply
    retire: bool = False


class GarbledFrame(RuntimeError):
    """The bytes are no such message."""


def pack(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


async def read_frame(reader: asyncio.StreamReader, kind: type[Message]) -> Message:
    """Raises GarbledFrame, and asyncio.IncompleteReadError when the other side ends."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise GarbledFrame(f"a frame of {length} bytes was announced")
    return _decode(await reader.readexactly(length), kind)


def receive_frame(stream: socket.socket, kind: type[Message]) -> Message:
    """Blocking `read_frame`. Raises EOFError when the other side ends."""
    return _decode(_receive(stream, int.from_bytes(_receive(stream, 4), "big")), kind)


def _receive(stream: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = stream.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _decode(body: bytes, kind: type[Message]) -> Message:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise GarbledFrame(str(error)) from error
