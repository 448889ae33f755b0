"""Weight sync and training in turns with engines on the same GPUs: who holds the engines, and when memory moves.

Flows in: the weight syncer, the trainer's memory, the engines that the rollout role names. Flows out: the same as of
any sync. Invariants: engines give memory up only while they are held, and are asked only for what they have; the hold
lasts from before a training step until its version serves, and ends with every engine whole or named as dirty. The one
in which the trained model is exported ends with the run.

    before_training(i):  hold → engines release KV cache and weights → trainer's memory comes back
    (step i)
    sync(i):             optimizer and gradients to the host → engines take weights → write, verify, commit
                         → weights to the host → engines take their KV cache and serve → release

Every method is called on every trainer rank.
"""

import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from slimerl.engine.client import EngineClient
from slimerl.engine.protocol import MemoryTag
from slimerl.resharding.sync import WeightLease, WeightSyncer
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import Status
from slimerl.telemetry.phases import PhaseClock
from slimerl.training.hand_over import HandOver, HandOverFailed, Share, TrainerParts

logger = logging.getLogger(__name__)

POLL_S = 0.2

Tags = frozenset[MemoryTag]


class LeasedEngines:
    """The engines' side of the turns, of one lease at a time. It remembers what each server has given up: asked for it
    twice, or to take back what it has, SGLang's scheduler would end."""

    def __init__(self) -> None:
        self._lease: WeightLease | None = None
        self._servers: dict[str, str] = {}
        """Engine id → admin key, which is new with every start of a server."""
        self._released: dict[str, Tags | None] = {}
        """By engine id; None: a call failed, and nobody knows."""

    def use(self, lease: WeightLease) -> None:
        """The engines to ask from now on. One of which nobody knows what it holds is set aside until it is restarted.

        A server that has just started has given up everything before it registered (`slimerl/engine/__main__.py`).
        """
        self._lease = lease
        for engine in lease.engines:
            name = engine.engine_id
            if self._servers.get(name) != engine.admin_key:
                self._servers[name], self._released[name] = engine.admin_key, frozenset(MemoryTag)
            if self._released[name] is None:
                lease.fleet.set_aside(name, f"{name}: it failed to hand its memory over earlier; restart it")

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Raises NoEngineLeft."""

        async def release(client: EngineClient, released: Tags) -> Tags:
            if held := [tag for tag in tags if tag not in released]:
                await client.release_memory(held)
            return released.union(held)

        self._each(release)

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Raises NoEngineLeft."""

        async def resume(client: EngineClient, released: Tags) -> Tags:
            if lacking := [tag for tag in tags if tag in released]:
                await client.resume_memory(lacking)
            return released.difference(lacking)

        self._each(resume)

    def serve(self) -> None:
        """Raises NoEngineLeft."""
        self._leased.serve()

    @property
    def _leased(self) -> WeightLease:
        if self._lease is None:
            raise RuntimeError("the engines are not held; their memory moves during a hold only")
        return self._lease

    def _each(self, move: Callable[[EngineClient, Tags], Coroutine[Any, Any, Tags]]) -> None:
        async def noted(client: EngineClient) -> None:
            released, self._released[client.engine_id] = self._released[client.engine_id], None
            assert released is not None  # else it was set aside
            self._released[client.engine_id] = await move(client, released)

        fleet = self._leased.fleet
        before = set(fleet.left)
        try:
            fleet.each(noted)
        finally:
            for name in before - set(fleet.left):
                logger.error("its memory was not handed over: %s", fleet.failures[name])

    def forget(self) -> None:
        """The lease has ended."""
        self._lease = None


class ColocatedSyncer:
    """The syncer of a run whose engines share the trainer's GPUs; see the module."""

    def __init__(self, syncer: WeightSyncer, parts: TrainerParts, share: Share, lease_s: float, is_first: bool) -> None:
        """
        Args:
            share: `hand_over.share_problems`.
            lease_s: of a hold, which spans a training step and a sync.
            is_first: this rank coordinates.
        """
        self._syncer, self._lease_s = syncer, lease_s
        self._engines = LeasedEngines() if is_first else None
        self._hand_over = HandOver(parts, self._engines, share)
        self._lease: WeightLease | None = None

    def before_training(self, version: int) -> None:
        """The trainer gets its memory back, for the step after which the weights are `version`.

        Raises:
            HandOverFailed: memory did not move; every rank raises it.
            ServiceFailed, DeadlineExceeded: the engines could not be held; on the first rank alone.
        """
        with self._together(f"the trainer could not take its memory back for version {version}"):
            self._hold(version)
            self._hand_over.begin_training()

    def sync(self, version: int) -> dict[str, float]:
        """As `WeightSyncer.sync`; in the end the engines have the memory.

        Raises:
            HandOverFailed: memory did not move, or the sync failed on another rank; every rank raises.
            What `WeightSyncer.sync` raises.
        """
        clock = PhaseClock()
        with self._together(f"the update to version {version} was not finished"):
            if self._lease is None:
                with clock("hold"):
                    self._hold(version)
            with clock("weights_turn"):
                self._hand_over.begin_sync()
            self._syncer.write(self._lease, clock)
            with clock("kv_turn"):
                self._hand_over.begin_generation()
        if self._lease is None:
            return {}
        with clock("release"):
            self._end(None)
        return dict(clock.seconds)

    def close(self) -> None:
        """At the end of the run."""
        if self._lease is not None:
            self._lease.fleet.close()

    def _hold(self, version: int) -> None:
        if self._engines is not None:
            self._lease = self._syncer.hold(version, self._lease_s)
            self._engines.use(self._lease)

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Where this rank fails, all do, and the engines that were held are dirty."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, HandOverFailed):  # of that one every rank knows
                self._hand_over.fail(f"{what}: {error}")
            self._end(f"{what}: {error}")
            raise

    def _end(self, problem: str | None) -> None:
        if self._lease is None or self._engines is None:
            return
        lease, self._lease = self._lease, None
        self._engines.forget()
        lease.end(problem)


def wait_for_room(status: Callable[[], Status] | None, engines: int, deadline: Deadline) -> None:
    """Until every engine has registered, and with that given up its memory: before the trainer's model is built.

    Args:
        status: of the rollout role, on the first rank; None on the others, which wait for that.

    Raises:
        DeadlineExceeded: says how many came; on the first rank alone.
    """
    if status is not None:
        while (registered := len(status().engines)) < engines:
            deadline.check(f"{registered} of {engines} have registered; see the logs of the others")
            time.sleep(min(POLL_S, deadline.remaining_s))
    dist.barrier()
