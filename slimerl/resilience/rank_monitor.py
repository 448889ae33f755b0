"""The rank monitors of nvidia-resiliency-ext, where it is installed: they kill a rank that hangs on a node that no
conductor watches.

    python -m slimerl.resilience.rank_monitor OPTION_OF_FT_LAUNCHER… PROGRAM…
is its launcher, which takes torchrun's place: beside every rank it starts a monitor, and the rank's heartbeat
(`resilience/heartbeat.py`) tells that monitor once a second that the rank gets on.
Flows out: a rank that has told nothing for the time that `monitor_options` sets is woken and killed (SIGKILL), the
monitor says so and which rank it was, and the launcher ends the other ranks of its node, or starts all again.
Invariant: what goes wrong between a rank and its monitor ends the monitoring with a warning, and never the rank.
"""

import importlib.util
import logging
import os
import signal
import sys
from functools import partial
from typing import Any

from slimerl.resilience.processes import die_with_parent

logger = logging.getLogger(__name__)

PACKAGE = "nvidia_resiliency_ext"
_SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"
"""Where the launcher tells a rank the address of its monitor."""
_ANSWER_S = 10.0
"""For a monitor; one that stands still must not hold up the heartbeat."""
_LEAVE_S = 30.0
"""For the launchers of other nodes to end, before the first node's does; the package has 300 s, which a rank that died
would keep the run from ending."""


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def monitor_options(silence_s: float) -> list[str]:
    """Options of the launcher. Args: `silence_s`: how long a rank may tell nothing, from its first word on."""
    return [
        *("--ft-initial-rank-heartbeat-timeout", f"{silence_s:g}"),
        *("--ft-rank-heartbeat-timeout", f"{silence_s:g}"),
        *("--ft-workload-check-interval", f"{min(5.0, silence_s / 4):g}"),
        *("--ft-log-level", "WARNING"),
        # what it takes for a broken link would kill a rank that NCCL still has a way for
        *("--ft-enable-nic-monitor", "false"),
    ]


class RankMonitor:
    """Of this process."""

    def __init__(self) -> None:
        """Raises where the monitor does not answer; the errors are the package's own."""
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        self._pid = os.getpid()
        self._client: Any = RankMonitorClient()
        self._client.init_workload_monitoring()
        self._client.rank_monitor_socket.settimeout(_ANSWER_S)

    def tell(self) -> None:
        """The rank gets on."""
        if not self._client.is_initialized:
            return
        try:
            self._client.send_heartbeat()
        except Exception as error:  # noqa: BLE001  # the package has no narrower one
            logger.warning("the rank monitor is told nothing more; a hang of this rank goes unnoticed: %s", error)
            self.close()

    def close(self) -> None:
        """The monitor is to expect nothing more. In a fork nothing happens: the connection is its parent's."""
        if os.getpid() != self._pid:
            return
        try:
            self._client.shutdown_workload_monitoring()
        except OSError as error:
            logger.debug("the rank monitor had closed the connection: %s", error)


def connect() -> RankMonitor | None:
    """None: this process has no monitor, or one that does not answer, which a warning says."""
    if _SOCKET not in os.environ:
        return None
    try:
        return RankMonitor()
    except Exception as error:  # noqa: BLE001  # as above
        logger.warning("no rank monitor will notice a hang of this rank: %s", error)
        return None


def main(arguments: list[str]) -> None:
    """Be the launcher. Exits with 0 where every rank did, else with 1."""
    from nvidia_resiliency_ext.fault_tolerance import launcher

    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # The monitors are forks, and would outlive a launcher that is killed. SIGTERM, for they remove their sockets.
    os.register_at_fork(after_in_child=partial(die_with_parent, os.getpid(), signal.SIGTERM))
    launcher.LocalElasticAgent = partial(launcher.LocalElasticAgent, exit_barrier_timeout=_LEAVE_S)
    launcher.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
