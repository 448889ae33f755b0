"""Scorers for the tests of the worker pool: each does to its worker what a bad verifier would."""

import os
import subprocess
import time

from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored, Unparsable


def score(request: RewardRequest) -> Outcome:
    """The response names what to do, the answer carries an argument."""
    return BEHAVIOURS[request.response](request.answer)


def right(_: str) -> Outcome:
    return Scored(1.0, True)


def wrong(_: str) -> Outcome:
    return Scored(0.0, False)


def unparsable(_: str) -> Outcome:
    return Unparsable()


def own_failure(_: str) -> Outcome:
    return Failed("own", "as asked")


def pid(_: str) -> Outcome:
    return Scored(float(os.getpid()), True)


def not_finite(_: str) -> Outcome:
    return Scored(float("nan"), True)


def raises(_: str) -> Outcome:
    raise ValueError("no such thing")


def hangs(_: str) -> Outcome:
    while True:
        pass


def deaf(_: str) -> Outcome:
    """Hangs and shrugs off every signal that can be shrugged off."""
    import signal

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return hangs("")


def eats_memory(_: str) -> Outcome:
    hoard = []
    while True:
        hoard.append(bytearray(32 * 2**20))


def prints(gib: str) -> Outcome:
    block = b"x" * 2**20
    for _ in range(int(float(gib) * 1024)):
        os.write(1, block)
        os.write(2, block)
    return Scored(1.0, True)


def floods_every_descriptor(_: str) -> Outcome:
    block = b"\xff" * 2**16
    # the number of the channel may be any
    inherited = [descriptor for descriptor in map(int, os.listdir("/proc/self/fd")) if descriptor > 2]
    while True:
        for descriptor in inherited:
            try:
                os.write(descriptor, block)
            except OSError:
                continue


def exits(_: str) -> Outcome:
    os._exit(3)


def forks(marker: str) -> Outcome:
    """Leaves a child behind, in a session of its own, and answers as if nothing had happened."""
    _leave_behind(marker)
    return Scored(1.0, True)


def forks_and_hangs(marker: str) -> Outcome:
    _leave_behind(marker)
    return hangs("")


def _leave_behind(marker: str) -> None:
    """A child in a session of its own, and one whose parent ends at once, so that only a subreaper still knows it."""
    sleeper = f"exec -a {marker} sleep 600"
    subprocess.Popen(["bash", "-c", sleeper], start_new_session=True)
    subprocess.run(["bash", "-c", f"setsid bash -c '{sleeper}' &"], check=True)


def naps(seconds: str) -> Outcome:
    time.sleep(float(seconds))
    return Scored(1.0, True)


BEHAVIOURS = {
    function.__name__: function
    for function in (
        right,
        wrong,
        unparsable,
        own_failure,
        pid,
        not_finite,
        raises,
        hangs,
        deaf,
        eats_memory,
        prints,
        floods_every_descriptor,
        exits,
        forks,
        forks_and_hangs,
        naps,
    )
}
