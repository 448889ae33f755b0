"""Checks of a program from within (`assert f(1) == 2`): the runner inside, the channel's end outside.

Flows in: a program, and statements to run in its namespace. Flows out: for each whether it passed.
Invariants: the program runs to its end before the checks are sent; a result counts only with the word that comes
with them. Program and checks share an interpreter, so that this keeps out `sys.exit(0)` and its like, not a program
written to forge its own result: where that matters, tests compare standard output, which happens outside.
"""

import secrets
import select
import socket
from collections.abc import Sequence
from contextlib import suppress

from slimerl.rewards.sandbox.inside import CHANNEL

CHECKS_RUNNER = f"""\
import os
def receive():
    parts, size = b"", int.from_bytes(os.read({CHANNEL}, 4), "big")
    while len(parts) < size:
        parts += os.read({CHANNEL}, size - len(parts))
    return parts.decode()
def main(receive=receive, write=os.write, compile=compile, exec=exec):
    names = {{"__name__": "__main__"}}
    exec(compile(receive(), "response.py", "exec"), names)
    write({CHANNEL}, b"loaded\\n")
    word, *checks = receive().split("\\0")
    for check in checks:
        try:
            exec(check, names)
            passed = 1
        except Exception:
            passed = 0
        write({CHANNEL}, f"{{word}} {{passed}}\\n".encode())
main()
"""
_BLOCK = 2**16


class CheckChannel:
    """Our end: sends the program, then, once it has run, the checks. Never blocks."""

    def __init__(self, end: socket.socket, source: str, checks: Sequence[str]) -> None:
        self._end = end
        self._end.setblocking(False)
        self._word = secrets.token_hex(16)
        self._checks: bytes | None = _framed("\0".join([self._word, *checks]))
        self._count = len(checks)
        self._outgoing = _framed(source)
        self._heard = b""
        self.closed = False
        """By the program."""

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def interest(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    @property
    def passed(self) -> tuple[bool, ...]:
        """Of each check that was reached, in order."""
        results = {f"{self._word} 1": True, f"{self._word} 0": False}
        lines = self._heard.decode(errors="replace").split("\n")
        return tuple(results[line] for line in lines if line in results)[: self._count]

    def serve(self) -> None:
        """Send and receive what can be without waiting."""
        if self._outgoing:
            with suppress(BlockingIOError, ConnectionError):
                self._outgoing = self._outgoing[self._end.send(self._outgoing) :]
        try:
            part = self._end.recv(_BLOCK)
        except BlockingIOError:
            return
        except ConnectionError:
            part = b""
        if not part:
            self.closed = True
        # A result has 35 bytes; more than all of them is nothing that would be looked at.
        self._heard = (self._heard + part)[: 64 * (self._count + 1)]
        if self._checks is not None and self._heard.startswith(b"loaded\n"):
            self._outgoing, self._checks = self._checks, None


def _framed(text: str) -> bytes:
    body = text.encode("utf-8", "replace")
    return len(body).to_bytes(4, "big") + body
