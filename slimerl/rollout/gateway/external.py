"""Agent programs outside of the run: each sample waits as an open session until a program has made it.

Flows in: samples that the scheduler (or the evaluation) has admitted; programs that ask for a task and end it. Flows
out: the sample with the branch of the session that is trained, and the program's reward where it gives one.
Invariants: a sample belongs to one session, and a task is given to one program; one whose request for a task was
cancelled gets none; a task that was taken is ended by its program, or dropped once nothing was heard of it for so long;
whatever ends a sample ends its session.
"""

import asyncio
import logging
import re
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from slimerl.rewards.outcome import Outcome, Scored
from slimerl.rollout.agents.loop import AgentFailed
from slimerl.rollout.agents.policy import Policy
from slimerl.rollout.gateway.branches import branch_sample
from slimerl.rollout.gateway.errors import ApiError, refused
from slimerl.rollout.gateway.sessions import Session, Sessions, Turn
from slimerl.rollout.prompts import Prompt
from slimerl.samples.sample import Sample

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,256}")
REMEMBERED_ENDS = 100_000
"""Sessions that have ended: what their programs still send is refused under its name."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a program says at the end. `reward`: None: the run's reward judges; `error`: it came to nothing."""

    turn: Turn | None
    others: tuple[Turn, ...] = ()
    """Ends of other branches that are trained, too."""
    reward: float | None = None
    correct: bool | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Task:
    """A sample that a program makes."""

    session_id: str
    policy: Policy
    prompt: Prompt
    session: Session
    taken: bool = False
    heard_s: float = 0.0
    """When its program was last heard of."""
    begun: bool = False
    ended: "asyncio.Future[Ending]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def sample(self) -> Sample:
        return self.policy.sample

    @property
    def is_evaluation(self) -> bool:
        return self.policy.urgent


@dataclass
class ExternalAgents:
    """An agent loop. `silent_s`: after so long without a sign of its program a task is given up; `branch`: what of a
    session is trained."""

    sessions: Sessions
    silent_s: float
    branch: Literal["finished", "longest", "all"] = "finished"
    clock: Callable[[], float] = time.monotonic
    new_name: Callable[[], str] = lambda: secrets.token_hex(8)
    """Of a task's session."""
    is_given: Callable[[str], bool] = lambda name: False
    """Is a name one that this run gives? No program begins a session under it."""
    counts: Counter[str] = field(default_factory=Counter)
    tasks: dict[str, Task] = field(default_factory=dict)
    """All that are open, taken or not, by session."""
    _waiting: deque[Task] = field(default_factory=deque)
    _programs: "deque[asyncio.Future[Task]]" = field(default_factory=deque)
    """Who waits for a task."""
    _over: OrderedDict[str, None] = field(default_factory=OrderedDict)

    async def __call__(self, policy: Policy, sample: Sample, prompt: Prompt) -> Outcome | None:
        """Offer the sample as a task, and wait for its end.

        Raises:
            AgentFailed: the program gave it up, or fell silent.
        """
        if policy.turn_ended:
            return None  # it was made before a restart, and only not judged
        task = self._offer(policy, prompt)
        try:
            return self._came_of(task, await self._end_of(task))
        finally:
            self._close(task)

    # --- for programs

    async def take(self, wait_s: float, own_id: str | None = None) -> Task | None:
        """The next task; None: there was none for so long.

        Args:
            own_id: what the program calls the session.

        Raises:
            ApiError: there is such a session already, or it cannot be called so.
        """
        if own_id is not None:
            self._check_free(own_id)
        task = self._taken(self._waiting.popleft()) if self._waiting else await self._next(wait_s)
        # its sample may have ended while the task was on its way here
        if task is None or task.ended.done():
            return None
        if own_id is not None:
            try:
                self._check_free(own_id)
            except ApiError:
                self._give(task)
                raise
            self._rename(task, own_id)
        self.counts["sessions_taken"] += 1
        return task

    def heard(self, session_id: str) -> Task | None:
        """A program speaks in a session; its task, if it has one.

        Raises:
            ApiError: the session has ended.
        """
        task = self.tasks.get(session_id)
        if task is not None:
            task.heard_s = self.clock()
        elif session_id in self._over or self.is_given(session_id):
            raise ApiError(410, "session_ended", f"session '{session_id}' has ended; take another: POST /v1/sessions")
        return task

    def end(self, session_id: str, reward: float | None, correct: bool | None, error: str | None) -> Task:
        """A program ends its session.

        Raises:
            ApiError: there is no such task, or nothing was sampled in it.
        """
        task = self.heard(session_id)
        if task is None or not task.taken:
            raise ApiError(
                404, "no_such_task", f"session '{session_id}' has no task; take one first: POST /v1/sessions"
            )
        turn = task.session.branch(self.branch)
        if turn is None and error is None:
            raise refused(
                f"nothing was sampled in session '{session_id}'; give it up with an error", "error", "nothing_sampled"
            )
        if not task.ended.done():
            others = [leaf for leaf in task.session.leaves() if leaf is not turn] if self.branch == "all" else ()
            task.ended.set_result(Ending(turn, tuple(others), reward, correct, error))
        return task

    def give_back(self, session_id: str) -> None:
        """A task that was taken for somebody who has gone since; nothing where it was begun or has ended."""
        task = self.tasks.get(session_id)
        if task is None or not task.taken or task.ended.done():
            return
        if not (task.session.turns or task.session.under_way):
            self._give(task)

    @property
    def waiting(self) -> int:
        """Tasks that no program has taken yet."""
        return len(self._waiting)

    # --- tasks

    def _offer(self, policy: Policy, prompt: Prompt) -> Task:
        session_id = self.new_name()
        session = self.sessions.use(session_id)
        session.pinned = True
        task = self.tasks[session_id] = Task(session_id, policy, prompt, session)
        self._give(task)
        return task

    def _give(self, task: Task) -> None:
        """To the program that has waited longest, or to the queue; evaluations, whose time is short, go first."""
        while self._programs:
            program = self._programs.popleft()
            if not program.done():
                program.set_result(self._taken(task))
                return
        task.taken = False
        if task.is_evaluation:
            self._waiting.appendleft(task)
        else:
            self._waiting.append(task)

    def _taken(self, task: Task) -> Task:
        task.taken, task.heard_s = True, self.clock()
        return task

    async def _next(self, wait_s: float) -> Task | None:
        program: asyncio.Future[Task] = asyncio.get_running_loop().create_future()
        self._programs.append(program)
        try:
            # unlike a timeout around it, a task that comes in the same moment is not lost
            await asyncio.wait([program], timeout=wait_s)
            return program.result() if program.done() else None
        except asyncio.CancelledError:
            if program.done() and not program.result().ended.done():
                self._give(program.result())  # the program has gone; another one is to have it
            raise
        finally:
            if not program.done():
                self._programs.remove(program)

    def _check_free(self, session_id: str) -> None:
        if not _NAME.fullmatch(session_id):
            raise refused("a session's name has up to 256 letters, digits, '.', '_' and '-'", "session_id")
        if session_id in self._over or self.sessions.get(session_id) is not None:
            raise ApiError(409, "session_exists", f"there is, or was, a session '{session_id}'; use another name")

    def _rename(self, task: Task, session_id: str) -> None:
        del self.tasks[task.session_id]
        self.sessions.close(task.session_id)
        task.session_id = session_id
        task.session = self.sessions.use(session_id)
        task.session.pinned = True
        self.tasks[session_id] = task

    async def _end_of(self, task: Task) -> Ending:
        while True:
            left_s = self._left_s(task)
            if left_s <= 0:
                self.counts["sessions_silent"] += 1
                raise AgentFailed(
                    "silent", f"session {task.session_id}: its program was silent for {self.silent_s:g} s"
                )
            done, _ = await asyncio.wait([task.ended], timeout=left_s)
            if done:
                return task.ended.result()

    def _left_s(self, task: Task) -> float:
        """Until a task is given up. One that nobody has taken, or whose request is under way, is not silent."""
        if not task.taken or task.session.under_way:
            return self.silent_s
        return task.heard_s + self.silent_s - self.clock()

    def _came_of(self, task: Task, ending: Ending) -> Outcome | None:
        if ending.error is not None:
            self.counts["sessions_given_up"] += 1
            raise AgentFailed("program_error", f"session {task.session_id}: {ending.error}")
        if ending.turn is None:
            raise AgentFailed("nothing_sampled", f"session {task.session_id} ended without a reply")
        sample = task.sample
        task.policy.adopt(branch_sample(ending.turn, sample.sample_id, sample.group_id, sample.prompt_id))
        trained = set(ending.turn.path())
        for turn in ending.others if not task.is_evaluation else ():
            fork = task.policy.fork(f"turn-{turn.number}", turn.path()[0].observed)
            fork.adopt(branch_sample(turn, fork.sample.sample_id, sample.group_id, sample.prompt_id, trained))
            trained.update(turn.path())
        self.counts["sessions_finished"] += 1
        if ending.reward is None:
            return None
        return Scored(ending.reward, ending.reward > 0 if ending.correct is None else ending.correct)

    def _close(self, task: Task) -> None:
        if not task.ended.done():
            task.ended.cancel()
        if not task.taken:
            self._waiting.remove(task)
        self.tasks.pop(task.session_id, None)
        self.sessions.close(task.session_id)
        self._over[task.session_id] = None
        while len(self._over) > REMEMBERED_ENDS:
            self._over.popitem(last=False)
