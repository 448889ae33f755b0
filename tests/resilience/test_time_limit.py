"""A time limit does what `asyncio.timeout` does, whatever else happens to the task."""

import asyncio
import random

import pytest

from slimerl.resilience.time_limit import TimeLimits

LIMITS = TimeLimits()
"""Over all tests, and so over event loops that have ended."""


def library(seconds: float):
    return asyncio.timeout(seconds)


class Own:
    """As `async with`, to be compared with the library's."""

    def __init__(self, seconds: float) -> None:
        self.limit = LIMITS.within(seconds)

    async def __aenter__(self) -> None:
        self.limit.__enter__()

    async def __aexit__(self, *args) -> None:
        self.limit.__exit__(*args)


@pytest.mark.parametrize("limit", [library, Own])
def test_what_takes_too_long_is_a_timeout_and_the_task_goes_on(limit):
    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with limit(0.01):
                await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 0
        async with limit(10.0):
            await asyncio.sleep(0)
        with pytest.raises(KeyError):
            async with limit(10.0):
                raise KeyError

    asyncio.run(run())


@pytest.mark.parametrize("limit", [library, Own])
def test_the_limit_that_is_over_is_the_one_that_says_so(limit):
    async def run() -> list[str]:
        said = []
        try:
            async with limit(0.01):
                try:
                    async with limit(10.0):
                        await asyncio.Event().wait()
                except TimeoutError:
                    said.append("inner")
        except TimeoutError:
            said.append("outer")
        return said

    assert asyncio.run(run()) == ["outer"]


@pytest.mark.parametrize("limit", [library, Own])
@pytest.mark.parametrize("late", [False, True])
def test_a_task_that_somebody_cancels_is_cancelled_also_where_its_time_is_over(limit, late):
    async def run() -> bool:
        async def waits() -> None:
            async with limit(0.01 if late else 10.0):
                try:
                    await asyncio.Event().wait()
                finally:
                    if late:
                        asyncio.current_task().cancel()

        task = asyncio.ensure_future(waits())
        if not late:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(run())


def test_of_many_that_begin_and_end_in_any_order_those_are_late_whose_time_is_over():
    """Virtual time: a loop whose clock is moved by hand."""
    rng, limits, late = random.Random(0), TimeLimits(), []

    async def one(number: int, limit_s: float, takes_s: float) -> None:
        try:
            with limits.within(limit_s):
                await asyncio.sleep(takes_s)
        except TimeoutError:
            late.append((number, asyncio.get_running_loop().time()))

    async def run() -> list[tuple[float, float, float]]:
        began, tasks = [], []
        for number in range(300):
            limit_s, takes_s = rng.choice([1.0, 5.0]), rng.choice([0.0, 0.5, 2.0, 30.0])
            began.append((asyncio.get_running_loop().time(), limit_s, takes_s))
            tasks.append(asyncio.ensure_future(one(number, limit_s, takes_s)))
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.3]))
        await asyncio.gather(*tasks)
        return began

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        began = runner.run(run())
        runner.run(asyncio.sleep(10.0))
    expected = {number: begun + limit for number, (begun, limit, takes) in enumerate(began) if takes > limit}
    assert {number: pytest.approx(when, abs=0.05) for number, when in late} == expected
    assert not limits._lines, "nothing is left of those that are over"


def test_the_timer_of_an_event_loop_that_has_ended_is_not_waited_for():
    limits = TimeLimits()

    async def breaks() -> None:
        with limits.within(0.01):
            raise KeyError

    async def waits() -> str:
        try:
            with limits.within(0.01):
                await asyncio.sleep(2.0)
        except TimeoutError:
            return "late"
        return "never"

    with pytest.raises(KeyError):
        asyncio.run(breaks())
    assert asyncio.run(waits()) == "late"


class SkippingLoop(asyncio.SelectorEventLoop):
    """Does not sleep, but moves its clock."""

    def __init__(self) -> None:
        super().__init__()
        self._now, plain = 0.0, self._selector.select

        def select(timeout: float | None = None) -> list:
            self._now += timeout or 0.0
            return plain(0)

        self._selector.select = select

    def time(self) -> float:
        return self._now
