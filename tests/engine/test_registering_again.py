"""An engine role registers with every rollout role that is started in the place of the one before."""

import asyncio

import pytest
from control_service import ControlService

from slimerl.engine import registration
from slimerl.engine.registration import follow, register
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import ADDRESS_FILE, EngineInfo

ENGINE = EngineInfo("engine-0", "http://127.0.0.1:1", "key", 1)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(registration, "LOOK_S", 0.02)


def test_a5_an_engine_registers_with_the_next_role_at_the_version_that_it_serves_and_once(tmp_path):
    """Injected: the rollout role ends, its address goes, and another announces itself; and once more."""
    asked: list[int] = []

    async def describe() -> EngineInfo:
        asked.append(len(asked))
        return EngineInfo("engine-0", "http://127.0.0.1:1", "key", 1, version=7 + len(asked))

    async def scene() -> None:
        with ControlService(tmp_path, token="first") as first:
            known = await register(ENGINE, tmp_path, Deadline("the first", 10.0))
            assert first.registered == [ENGINE]
            following = asyncio.create_task(follow(describe, tmp_path, known, 10.0))
            await asyncio.sleep(0.1)
            assert not asked, "the role is the same"
        (tmp_path / ADDRESS_FILE).unlink()
        for number, token in enumerate(("second", "third")):
            with ControlService(tmp_path, token=token) as other:
                async with asyncio.timeout(10):
                    while not other.registered:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                assert [one.version for one in other.registered] == [8 + number]
        assert not following.done()
        following.cancel()

    asyncio.run(scene())
