"""Run a function in a process of its own, with or without the GPUs of this machine, inside a process group of one.

On a GPU machine the CPU's numbers come from a process that sees no GPU: Megatron decides on import what it runs on.
"""

import importlib.util
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from slimerl.resilience.deadline import Deadline
from slimerl.resilience.processes import die_with_parent

DEADLINE_S = 170.0


def needs_gpus(count: int) -> pytest.MarkDecorator:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason = (
        "needs CUDA: this torch has none, or there is no GPU" if not found else f"needs {count} GPUs, found {found}"
    )
    return pytest.mark.skipif(found < count, reason=reason)


def needs_library(module: str, install: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"needs {module}: {install}")


needs_transformer_engine = needs_library("transformer_engine", "pip install -r requirements-gpu.txt")


def in_process(function: Callable[..., Any], *args: Any, gpu: bool, deadline_s: float = DEADLINE_S) -> Any:
    """The result of `function(*args)`, which must be importable."""
    return in_processes([(function, args)], gpus=["0" if gpu else ""], deadline_s=deadline_s)[0]


def in_processes(
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]], gpus: list[str], deadline_s: float = DEADLINE_S
) -> list[Any]:
    """One process per call, each with its own CUDA_VISIBLE_DEVICES and, of torch.distributed, a group of its own.

    Raises:
        AssertionError: one raised; its traceback is in the message.
        DeadlineExceeded: one did not answer in time; all are killed.
    """
    context = multiprocessing.get_context("spawn")
    deadline = Deadline("the processes of a GPU test", deadline_s)
    started = []
    try:
        for (function, args), visible in zip(calls, gpus, strict=True):
            ours, theirs = context.Pipe()
            payload = pickle.dumps((function, args))
            process = context.Process(target=_serve, args=(theirs, os.getpid(), visible, list(sys.path), payload))
            process.start()
            theirs.close()
            started.append((process, ours))
        with ThreadPoolExecutor(len(started)) as pool:
            answers = list(pool.map(lambda each: _answer(each[1], deadline), started))
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    failed = [value for succeeded, value in answers if not succeeded]
    assert not failed, "\n".join(failed)
    return [value for _, value in answers]


def _answer(connection: Connection, deadline: Deadline) -> tuple[bool, Any]:
    if not connection.poll(deadline.remaining_s):
        deadline.check()
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return False, "the process ended without an answer"


def _serve(connection: Connection, parent: int, visible: str, path: list[str], payload: bytes) -> None:
    die_with_parent(parent)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible  # before the first CUDA call of this process
    sys.path[:] = path
    import torch.distributed as dist

    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        function, args = pickle.loads(payload)
        answer = (True, function(*args))
    except Exception:  # noqa: BLE001 (every failure is told to the test)
        answer = (False, traceback.format_exc())
    # pickled here: multiprocessing would share tensors with a process that is about to end
    connection.send_bytes(pickle.dumps(answer))
    connection.close()
    os._exit(0)  # what CUDA and NCCL do at exit is not tested here
