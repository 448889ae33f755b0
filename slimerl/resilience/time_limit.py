"""`asyncio.timeout` in a fraction of its CPU time, for waits that are begun a thousand times a second.

Flows in: seconds. Flows out: TimeoutError where what stands in the block took longer. It is the library's own way (the
task is cancelled, and that is taken back), without coroutines, and with one timer of the event loop for all blocks of
the same length: their times end in the order in which they began, and nearly all are left long before.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol


class Limited(Protocol):
    """What may end before its time."""

    ends_s: float

    def expire(self) -> None: ...


class TimeLimits:
    """`with limits.within(seconds):` around what a task awaits. Who raises it further names the wait. What can be ended
    in another way than by cancelling a task joins its `Line` by itself."""

    def __init__(self) -> None:
        self._lines: dict[float, Line] = {}
        """By length, as long as there are blocks, or were of late."""

    def within(self, seconds: float) -> "_Limit":
        return _Limit(self, seconds)

    def join(self, limited: Limited, seconds: float) -> "Line":
        """From now on; it is to leave the line once it is over."""
        loop = asyncio.get_running_loop()
        line = self._lines.get(seconds)
        if line is None or line.loop is not loop:
            line = self._lines[seconds] = Line(loop, lambda: self._lines.pop(seconds, None))
        limited.ends_s = loop.time() + seconds
        line.join(limited)
        return line


class _Limit:
    """One block."""

    __slots__ = ("_before", "_late", "_limits", "_line", "_seconds", "_task", "ends_s")

    def __init__(self, limits: TimeLimits, seconds: float) -> None:
        self._limits = limits
        self._seconds = seconds
        self._late = False
        self.ends_s = math.inf

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit is for what a task waits for")
        self._task: asyncio.Task[Any] = task
        self._before = task.cancelling()
        self._line = self._limits.join(self, self._seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.leave(self)
        # cancelled by somebody else, too: then that is what happened
        if self._late and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        self._late = True
        self._task.cancel()


class Line:
    """Blocks of the same length, the first to end first. `empty`: called when there are none any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop, empty: Callable[[], object]) -> None:
        self.loop = loop
        self.waiting: OrderedDict[Limited, None] = OrderedDict()
        self._empty = empty
        self._timed = False

    def join(self, limited: Limited) -> None:
        self.waiting[limited] = None
        if not self._timed:
            self._come_again(limited.ends_s)

    def leave(self, limited: Limited) -> None:
        self.waiting.pop(limited, None)

    def _come_again(self, at_s: float) -> None:
        self._timed = True
        self.loop.call_at(at_s, self._look)

    def _look(self) -> None:
        """End those whose time is over."""
        self._timed = False
        now = self.loop.time()
        while self.waiting:
            limit = next(iter(self.waiting))
            if limit.ends_s > now:
                self._come_again(limit.ends_s)
                return
            del self.waiting[limit]
            limit.expire()
        self._empty()
