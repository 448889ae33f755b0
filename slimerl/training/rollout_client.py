"""The trainer's side of the control service: plain blocking calls over HTTP.

Flows in: messages of `slimerl.samples.messages`. Flows out: the answers. Invariant: every call ends, with an answer
or an error that names the path and what the service said, within its deadline.
"""

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.samples.messages import (
    TOKEN_HEADER,
    BatchManifest,
    BatchTrained,
    EngineInfo,
    EngineLost,
    EvaluateReply,
    EvaluateRequest,
    FetchRequest,
    HoldReply,
    HoldRequest,
    NextBatchRequest,
    Refusal,
    ReleaseRequest,
    RolloutState,
    SamplePayload,
    ServiceAddress,
    Status,
    SyncWanted,
    address_file,
    decode,
    encode,
    read_address,
)
from slimerl.samples.messages import Path as Endpoint

POLL_S = 0.2

ANSWER_MARGIN_S = 10.0
"""How long after its own deadline the service may still be answering that it has passed."""


class ServiceFailed(RuntimeError):
    """The control service refused a call, or could not be reached."""


class RolloutClient:
    """One connection per call: a call is rare (some per step), and a kept connection would have to be watched."""

    def __init__(self, address: ServiceAddress, request_s: float, run_dir: Path | None = None) -> None:
        """Args: `request_s`: bound of a call that does not bring its own; `run_dir`: where other rollout processes of
        the run announce themselves."""
        self.address = address
        parts = urlsplit(address.url)
        self._host, self._port, self._token = parts.hostname or "", parts.port or 80, address.token
        self._request_s, self._run_dir = request_s, run_dir

    @staticmethod
    def connect(run_dir: Path, deadline: Deadline, request_s: float, process: int = 0) -> "RolloutClient":
        """Wait until the rollout role has announced itself and answers.

        Args:
            process: its number, where there are several.

        Raises:
            DeadlineExceeded: says whether the address file was missing, or what became of the last call.
        """
        file = run_dir / address_file(process)
        while True:
            try:
                client = RolloutClient(read_address(run_dir, process), request_s, run_dir)
                client.health()
            except FileNotFoundError:
                deadline.check(f"{file} is not there")
            except ServiceFailed as error:
                # the file may be left from an earlier run and about to be replaced
                deadline.check(str(error))
            else:
                return client
            time.sleep(min(POLL_S, deadline.remaining_s))

    def health(self) -> None:
        self._call("GET", Endpoint.HEALTH, b"", self._request_s)

    def status(self) -> Status:
        return self._ask("GET", Endpoint.STATUS, None, Status)

    def next_batch(self, step: int, timeout_s: float) -> BatchManifest | SyncWanted:
        """Wait for the samples of `step`. Raises ServiceFailed (also when the service waited in vain)."""
        request, kinds = NextBatchRequest(step, timeout_s), BatchManifest | SyncWanted
        return self._ask("POST", Endpoint.NEXT_BATCH, request, kinds, timeout_s + ANSWER_MARGIN_S)

    def trained(self, batch_id: str, version: int) -> None:
        """The batch has been used; the weights are now `version`."""
        self._ask("POST", Endpoint.BATCH_TRAINED, BatchTrained(batch_id, version), None)

    def fetch(self, sample_ids: Sequence[str], shards: Sequence[int] = ()) -> list[SamplePayload]:
        """Payloads in the order of the ids.

        Args:
            shards: which rollout process holds each, where there are several; they are asked at the same time.
        """
        if not shards:
            return self._fetch(sample_ids)
        of_shard: dict[int, list[str]] = {}
        for sample_id, shard in zip(sample_ids, shards, strict=True):
            of_shard.setdefault(shard, []).append(sample_id)
        with ThreadPoolExecutor(len(of_shard)) as threads:
            parts = list(threads.map(lambda item: self._of(item[0])._fetch(item[1]), of_shard.items()))
        found = {payload.sample_id: payload for part in parts for payload in part}
        return [found[sample_id] for sample_id in sample_ids]

    def _of(self, shard: int) -> "RolloutClient":
        """For another rollout process; its address is read each time, for it may have been started again."""
        if shard == 0:
            return self
        if self._run_dir is None:
            raise ServiceFailed(f"where rollout process {shard} runs is not known: this client was given one address")
        try:
            return RolloutClient(read_address(self._run_dir, shard), self._request_s, self._run_dir)
        except OSError as error:
            raise ServiceFailed(f"rollout process {shard} cannot be asked; has it ended? {error}") from None

    def _fetch(self, sample_ids: Sequence[str]) -> list[SamplePayload]:
        """From this process, as many with one call as it gives."""
        payloads: list[SamplePayload] = []
        while len(payloads) < len(sample_ids):
            asked = list(sample_ids[len(payloads) :])
            part = self._ask("POST", Endpoint.FETCH_SAMPLES, FetchRequest(asked), list[SamplePayload])
            found = [payload.sample_id for payload in part]
            if not found or found != asked[: len(found)]:
                raise ServiceFailed(f"{Endpoint.FETCH_SAMPLES}: asked for {len(asked)} samples, got others: {found}")
            payloads += part
        return payloads

    def hold(self, request: HoldRequest) -> HoldReply:
        """Stop dispatching. The service waits for running requests, at most as long as the lease."""
        return self._ask("POST", Endpoint.HOLD, request, HoldReply, request.lease_s + ANSWER_MARGIN_S)

    def release(self, request: ReleaseRequest) -> None:
        self._ask("POST", Endpoint.RELEASE, request, None)

    def begin_evaluation(self, step: int, timeout_s: float) -> None:
        """Of the present weights, while the caller does something else; `evaluate` has the result."""
        self._ask("POST", Endpoint.BEGIN_EVALUATION, EvaluateRequest(step, timeout_s), None)

    def evaluate(self, step: int, timeout_s: float) -> EvaluateReply | SyncWanted:
        """The held-out prompts with the present weights, or what `begin_evaluation` has begun."""
        request, kinds = EvaluateRequest(step, timeout_s), EvaluateReply | SyncWanted
        return self._ask("POST", Endpoint.EVALUATE, request, kinds, timeout_s + ANSWER_MARGIN_S)

    def engine_lost(self, lost: EngineLost) -> EngineInfo:
        """An engine has ended. Returns it as it was; raises ServiceFailed where it had not registered."""
        return self._ask("POST", Endpoint.ENGINE_LOST, lost, EngineInfo)

    def state(self) -> RolloutState:
        """What the rollout role has to know to go on from here; ask after `trained`."""
        return self._ask("GET", Endpoint.STATE, None, RolloutState)

    def restore(self, state: RolloutState) -> None:
        """Let a rollout role that has just started go on from there."""
        self._ask("POST", Endpoint.RESTORE, state, None)

    def shutdown(self) -> None:
        """Tell the rollout role to end."""
        self._ask("POST", Endpoint.SHUTDOWN, None, None)

    def _ask(
        self,
        method: str,
        path: Endpoint,
        message: msgspec.Struct | None,
        kind: Any,
        timeout_s: float | None = None,
    ) -> Any:
        """Args: `kind`: of the answer, as msgspec takes it; None: there is none."""
        body = encode(message) if message is not None else b""
        answer = self._call(method, path, body, timeout_s or self._request_s)
        if kind is None:
            return None
        try:
            return decode(answer, kind)
        except msgspec.MsgspecError as error:
            raise ServiceFailed(f"{path}: the answer is no {kind}: {error}") from None

    def _call(self, method: str, path: Endpoint, body: bytes, timeout_s: float) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        headers = {TOKEN_HEADER: self._token, "Content-Type": "application/msgpack"}
        try:
            connection.request(method, str(path), body, headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            raise DeadlineExceeded(f"waited {timeout_s:g} s for the rollout role to answer {path}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServiceFailed(
                f"{path}: the rollout role at {self._host}:{self._port} cannot be reached ({error!r}); has it ended?"
            ) from None
        finally:
            connection.close()
        if response.status >= 400:
            raise ServiceFailed(f"{path}: refused with {response.status}: {_reason(content)}")
        return content


def _reason(content: bytes) -> str:
    try:
        return decode(content, Refusal).error
    except msgspec.MsgspecError:
        return json.dumps(content[:300].decode(errors="replace"))
