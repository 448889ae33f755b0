"""The process of one SGLang server: `python -m slimerl.engine.inside.serve PARENT_PID [arguments of launch_server]`.

Flows in: SGLang's command line; from the environment, set by `launcher.py`, `KEY_VARIABLE` (the secret, which a
command line would show to every user of the machine) and, without CUDA, `SGLANG_USE_CPU_ENGINE=1`.
Invariant: no process of the server outlives PARENT_PID, not even when that one is killed.

What must hold in every process of the engine, and in no other process, is set up here, before anything of SGLang is
imported: in the first process; in its workers that multiprocessing spawns, where this module is `__mp_main__`; and in
those that are forked (`cpu_shim.py`), which have it from the first one.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from slimerl.engine.inside.import_hooks import after_import
from slimerl.resilience.heartbeat import show_stacks_on_signal
from slimerl.resilience.imports import without_collections
from slimerl.resilience.processes import Orphaned, die_with_parent

KEY_VARIABLE = "SLIMERL_ENGINE_KEY"
_ROOT_VARIABLE = "SLIMERL_ENGINE_ROOT_PID"


def _prepare_process() -> None:
    """Before SGLang is imported, in the server's first process and in each worker."""
    show_stacks_on_signal()
    after_import("sglang.srt.managers.load_snapshot", _keep_snapshots_in_private_directory)
    after_import("sglang.srt.entrypoints.engine", _keep_keys_out_of_the_log)
    after_import("sglang.srt.entrypoints.http_server", _do_not_call_before_listening)
    after_import("sglang.srt.managers.scheduler", _sleep_while_paused)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from slimerl.engine.inside.cpu_shim import install

        install()


def _tie_forked_processes() -> None:
    """SGLang ties its workers to their parent as well, but only once they have begun their work."""
    forking: list[int] = []

    def tie() -> None:
        try:
            die_with_parent(forking[-1])
        except Orphaned:
            os._exit(1)

    os.register_at_fork(before=lambda: forking.append(os.getpid()), after_in_child=tie, after_in_parent=forking.clear)


def _keep_snapshots_in_private_directory(module: ModuleType) -> None:
    """SGLang maps a file of /dev/shm by name and leaves it behind when it is killed."""

    def path_for(ipc_name: str) -> str:
        return str(Path(tempfile.gettempdir()) / f"loads_{Path(ipc_name).name}")

    module.shm_path_for = path_for  # type: ignore[attr-defined]


def _keep_keys_out_of_the_log(module: ModuleType) -> None:
    stock: Callable[[Any], dict[str, Any]] = module._server_args_for_logging

    def without_keys(server_args: Any) -> dict[str, Any]:
        return {key: "…" if key.endswith("api_key") else value for key, value in stock(server_args).items()}

    module._server_args_for_logging = without_keys  # type: ignore[attr-defined]


def _do_not_call_before_listening(module: ModuleType) -> None:
    """Without its warm-up SGLang calls its own /freeze_gc too early and logs a traceback; the launcher calls it."""
    nothing: Callable[[Any], None] = lambda _server_args: None  # noqa: E731
    module._freeze_gc_after_server_warmup = nothing  # type: ignore[attr-defined]


def _sleep_while_paused(module: ModuleType) -> None:
    """With --sleep-on-idle SGLang sleeps while it has no request, but not while it is paused: a core for each rank, all
    through a weight update, that the trainer and the update itself lack where cores are few."""
    stock: Callable[[Any], None] = module.Scheduler._record_scheduler_state_for_paused_engine

    def then_sleep(scheduler: Any) -> None:
        stock(scheduler)
        # a message reaches only the first of several attention groups' sockets; the others must come by themselves
        if not scheduler.attn_dp_enabled:
            scheduler.maybe_sleep_on_idle()

    module.Scheduler._record_scheduler_state_for_paused_engine = then_sleep


def main(argv: list[str]) -> None:
    """Serve until asked to stop.

    Raises:
        Orphaned: the parent was gone already.
    """
    die_with_parent(int(argv[1]))
    os.environ[_ROOT_VARIABLE] = str(os.getpid())
    _tie_forked_processes()
    _prepare_process()

    key = os.environ.pop(KEY_VARIABLE)
    with without_collections():
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

        load_plugins()
        # Both keys: with the admin key alone /server_info stays open, and it shows every argument, keys included.
        # Written with "=": a key may begin with a minus, which argparse would take for an option.
        server_args = prepare_server_args([*argv[2:], f"--api-key={key}", f"--admin-api-key={key}"])
        import sglang.srt.entrypoints.http_server  # noqa: F401 - `run_server` would
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv)
elif __name__ == "__mp_main__":
    # SGLang ties its workers to their parent as well, but only after the seconds that its own import takes.
    if os.environ.get(_ROOT_VARIABLE) == str(os.getppid()):
        try:
            die_with_parent(os.getppid())
        except Orphaned:
            sys.exit(1)
    _prepare_process()
