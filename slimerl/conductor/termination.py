"""SIGTERM to `slimerl run`: save, then end. SIGUSR1: the same, with as much time as it takes.

Schedulers send it some time before SIGKILL: SLURM and Kubernetes 30 seconds, unless told otherwise. The run gets
`deadlines.terminate_s` of that to finish its step and its checkpoint, as `slimerl stop` asks for, without its limit.
SIGUSR1 comes from the script of a job, well before its time limit, and again until the run has ended: what goes wrong
meanwhile is mended as ever, and a run that starts over is to stop as well.

Flows in: signals. Flows out: the request to the trainer, and `Terminated` where there is nothing more to wait for.
"""

import signal
from types import FrameType

from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.spec import RunSpec
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR, STOP_FILE
from slimerl.training.checkpoint.local import newest_checkpoint


class Terminated(Exception):
    """SIGTERM arrived; the message says what of the run is saved."""


class TerminationRequest:
    """Of one run, however often it starts over. `arrive` is the handler of SIGTERM; a second signal ends the run at
    once."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._deadline: Deadline | None = None
        self._noticed = False

    saves = False
    """SIGUSR1 has come."""

    @property
    def made(self) -> bool:
        return self._deadline is not None

    def arrive(self, _signal: int, _frame: FrameType | None) -> None:
        """Raises Terminated: nothing will be saved."""
        if self.made or not self._spec.checkpoint.every_steps:
            raise self.terminated("")
        self._deadline = Deadline("the checkpoint of the step to be saved", self._spec.deadlines.terminate_s)
        (self._spec.run_dir / STOP_FILE).touch()

    def save(self, _signal: int, _frame: FrameType | None) -> None:
        """The handler of SIGUSR1. A run without checkpoints goes on: it would lose all it has."""
        if self._spec.checkpoint.every_steps:
            self.saves = True
            (self._spec.run_dir / STOP_FILE).touch()

    def notice(self) -> None:
        """Has the run been asked to stop, by a signal or by `slimerl stop`? Often enough to see each request."""
        self._noticed = self._noticed or (self._spec.run_dir / STOP_FILE).exists()

    def repeat(self) -> None:
        """The run starts over, which has removed the request, or a trainer had taken it whose checkpoint failed."""
        if self._noticed:
            (self._spec.run_dir / STOP_FILE).touch()

    def check(self) -> None:
        """Raises Terminated once the time for saving is over."""
        if self._deadline is None:
            return
        try:
            self._deadline.check("deadlines.terminate_s")
        except DeadlineExceeded as error:
            raise self.terminated(str(error)) from None

    def terminated(self, why: str) -> Terminated:
        """To be raised. `why`: the run did not end by itself; empty: it did, or was not asked to."""
        newest = newest_checkpoint(self._spec.run_dir / CHECKPOINTS_DIR)
        goes_on = "started again, it needs --fresh: it has no checkpoint"
        if newest is not None:
            goes_on = f"started again, it goes on after step {newest}"
        return Terminated("; ".join(filter(None, (goes_on, why))))


class WhileRolesEnd:
    """Signals must not cut short how the roles of a run are ended; nor are they lost where the run then starts over.

    To be made while the handler of SIGTERM is the one that is to hold afterwards.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._request = TerminationRequest(spec)
        self._arrived: set[int] = set()
        self._before = signal.getsignal(signal.SIGTERM)

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self._arrived.add(number))

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def obey(self) -> None:
        """Raises KeyboardInterrupt, Terminated: one has arrived."""
        if signal.SIGINT in self._arrived:
            raise KeyboardInterrupt
        if self._arrived:
            raise self._request.terminated("")
