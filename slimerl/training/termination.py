"""SIGTERM ends the process soon, also while it waits in a collective.

Python runs signal handlers between two bytecodes, and a wait inside gloo or NCCL may last for half an hour. The
handler therefore only asks (SystemExit, so that `finally` blocks run); a thread that the kernel wakes insists.
"""

import os
import signal
import socket
import threading
import time
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
GRACE_S = 2.0
"""For the `finally` blocks: ending a hold, removing shared memory."""


def end_on_sigterm(grace_s: float = GRACE_S) -> None:
    """From now on SIGTERM ends this process with exit code 143 within `grace_s`. Call it on the main thread."""

    def ask(number: int, frame: FrameType | None) -> None:
        # a second SIGTERM must not interrupt the clean-up of the first
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(EXIT_CODE)

    waker, woken = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_insist, args=(waker, woken, grace_s), name="sigterm", daemon=True).start()
    signal.signal(signal.SIGTERM, ask)


def _insist(waker: socket.socket, woken: socket.socket, grace_s: float) -> None:
    """`waker` is held here: closed with its last reference, it would take the wake-ups with it."""
    while signal.SIGTERM not in woken.recv(16):
        pass
    time.sleep(grace_s)
    os._exit(EXIT_CODE)
