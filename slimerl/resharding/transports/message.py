"""Messages to the loader inside an engine, and its reports.

Flows in: what to do. Flows out: the payload of one `update_weights_from_tensor` call; per engine and rank, a report.
Reports come through a `TCPStore`, since SGLang discards what a loader returns; on the loopback interface, unless an
engine runs on another machine. Its keys start with a secret of the session: another process cannot pass a report off
as an engine's.
"""

import json
import pickle
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from slimerl.engine.client import EngineClient, EngineError
from slimerl.engine.inside.weight_group import is_this_machine, own_address_towards
from slimerl.engine.protocol import LOADER

_REPORT_WAIT_S = 5.0
"""A report is written before the engine answers the call; what is not there by then never comes."""


class LoaderError(EngineError):
    """The loader inside an engine rank reported an error, or nothing."""


def payload(message: dict[str, Any]) -> bytes:
    """`[(name, tensor)]` as SGLang wants it. The bytes travel inline: a shared-memory handle would crash it."""
    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    return pickle.dumps([("slimerl", text)])


class ReportDesk:
    """Hosts the store for one session of updates, and asks engines through their loaders."""

    def __init__(self, timeout_s: float, engine_hosts: Mapping[str, str]) -> None:
        """`engine_hosts`: by engine, the host of its address."""
        self._timeout_s = timeout_s
        self._secret = secrets.token_hex(16)
        self._calls = 0
        self.host = _reachable_address(engine_hosts.values())
        with socket.create_server((self.host, 0)) as listener:
            self.port = listener.getsockname()[1]
            # torch would listen on every interface; it takes over this socket instead.
            self._store: TCPStore | None = TCPStore(
                self.host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )

    def close(self) -> None:
        self._store = None

    def publish(self, name: str, data: bytes | memoryview) -> str:
        """Offer bytes, at most 8 MiB, to engines; returns the key under which they get them until `withdraw`."""
        if self._store is None:
            raise RuntimeError("the report desk is closed")
        key = f"{self._secret}/{name}"
        self._store.set(key, bytes(data))  # type: ignore[arg-type]  # it takes bytes as well
        return key

    def withdraw(self, key: str) -> None:
        if self._store is not None:
            self._store.delete_key(key)

    async def ask(
        self, client: EngineClient, messages: Sequence[dict[str, Any]], timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """One message per tensor-parallel rank; returns the reports in rank order.

        Raises:
            EngineError: the call failed, or (LoaderError) a rank reported an error or nothing.
        """
        self._calls += 1
        key = f"{self._secret}/{self._calls}/{client.engine_id}"
        reply = {"host": self.host, "port": self.port, "key": key, "timeout_s": self._timeout_s}
        await client.run_loader([payload({**message, "reply": reply}) for message in messages], timeout_s=timeout_s)
        with self._reading() as store:
            reports = [_read(store, f"{key}/{rank}") for rank in range(len(messages))]
        problems = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if not report["ok"]]
        if problems:
            raise LoaderError(client.engine_id, f"{LOADER} ({messages[0]['op']})", "; ".join(problems))
        return reports

    @contextmanager
    def _reading(self) -> Iterator[TCPStore]:
        if self._store is None:
            raise RuntimeError("the report desk is closed")
        self._store.set_timeout(timedelta(seconds=_REPORT_WAIT_S))
        yield self._store


def _reachable_address(hosts: Iterable[str]) -> str:
    """Loopback, unless a host is another machine; unknown hosts fail at their own calls."""
    for host in hosts:
        if not is_this_machine(host):
            with suppress(OSError):
                return own_address_towards(host)
    return "127.0.0.1"


def _read(store: TCPStore, key: str) -> dict[str, Any]:
    try:
        report = json.loads(store.get(key))
    except RuntimeError:  # torch's DistStoreError: the wait was in vain
        return {"ok": False, "error": "no report came; the log of the engine says why"}
    store.delete_key(key)
    return report
