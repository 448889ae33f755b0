"""The trainer's side of the control service: plain blocking calls over HTTP.

Flows in: messages of `slimerl.samples.messages`. Flows out: the answers. Invariant: every call ends, with an answer
or an error that names the path and what the service said, within its deadline.

Where the role ends, a call of `REPEATED` waits for the one that is started in its place and is made again; where it
lives and a connection to it broke, so is the call, but for those of `NOT_TWICE`.
"""

import http.client
import json
import logging
import time
from collections.abc import Sequence
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
from slimerl.training.successor import Successors

logger = logging.getLogger(__name__)

POLL_S = 0.2

ANSWER_MARGIN_S = 10.0
"""How long after its own deadline the service may still be answering that it has passed."""
LIVES_S = 5.0
"""For a role to say that it is still there."""

REPEATED = {
    Endpoint.STATUS: "it changes nothing",
    Endpoint.NEXT_BATCH: "a batch that was handed out and not acknowledged is handed out again",
    Endpoint.FETCH_SAMPLES: "samples stay until their batch is acknowledged",
    Endpoint.BATCH_TRAINED: "a batch that was acknowledged stays so",
    Endpoint.HOLD: "a hold ends with its role",
    Endpoint.RELEASE: "a release that was carried out is known by its lease; any other is refused",
    Endpoint.BEGIN_EVALUATION: "it samples for nobody else",
    Endpoint.EVALUATE: "it samples for nobody else",
    Endpoint.STATE: "it changes nothing",
    Endpoint.RESTORE: "it is refused where samples have been admitted",
}
"""Calls that another role, which has taken over from one that ended, may be asked again, and why."""

NOT_TWICE = {
    Endpoint.HOLD: "the engines are held for whoever did not hear the answer, until that lease has run out",
    Endpoint.RESTORE: "what was restored is admitted",
}
"""Of these, those that the same role is not asked again where a connection broke, and why."""
BROKEN = 3
"""Connections of one call that may break although the role lives."""


class ServiceFailed(RuntimeError):
    """The control service refused a call, or could not be reached."""


class RoleGone(ServiceFailed):
    """The role that was asked cannot be reached, or another listens in its place; what the call did is not known."""


class RolloutClient:
    """One connection per call: a call is rare (some per step), and a kept connection would have to be watched."""

    def __init__(self, address: ServiceAddress, request_s: float, successors: Successors | None = None) -> None:
        """
        Args:
            request_s: bound of a call that does not bring its own.
            successors: where the next role is found; None: calls fail where this one ends.
        """
        self.address, self.successors = address, successors
        self._request_s = request_s

    @staticmethod
    def connect(
        run_dir: Path, deadline: Deadline, request_s: float, successor_s: float = 0.0, process: int = 0
    ) -> "RolloutClient":
        """Wait until the rollout role has announced itself and answers.

        Args:
            successor_s: for another one to be started in its place where it ends later; 0: none will be.
            process: its number, where there are several.

        Raises:
            DeadlineExceeded: says whether the address file was missing, or what became of the last call.
        """
        file = run_dir / address_file(process)
        successors = Successors(run_dir, successor_s, process) if successor_s else None
        while True:
            try:
                client = RolloutClient(read_address(run_dir, process), request_s, successors)
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
        self._once("GET", Endpoint.HEALTH, b"", self._request_s)

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
        """Payloads in the order of the ids, as many with one call as the service gives.

        Args:
            shards: which rollout process holds each; of an only one there is nothing to say.
        """
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

    def begin_evaluation(self, step: int, timeout_s: float) -> bool:
        """Of the present weights, while the caller does something else; `evaluate` has the result. Asked again it is
        the same evaluation. Returns whether there is something to wait for: no result yet, and one may come."""
        status: Status = self._ask("POST", Endpoint.BEGIN_EVALUATION, EvaluateRequest(step, timeout_s), Status)
        return step in status.evaluating

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

    def begin_anew(self, run_dir: Path) -> None:
        """The role gives up all that it has, and serves elsewhere as one that has just started. Returns once it is not
        found any more where it was."""
        self._ask("POST", Endpoint.BEGIN_ANEW, None, None)

        def elsewhere() -> bool:
            try:
                return read_address(run_dir).token != self.address.token
            except FileNotFoundError:
                return True

        Deadline("the rollout role to leave its address", self._request_s).wait_until(elsewhere, POLL_S)

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
        broken, answer = 0, self._for_answer(path, timeout_s)
        deadline: Deadline | None = None
        while True:
            try:
                return self._once(method, path, body, answer.remaining_s)
            except RoleGone as error:
                if path not in REPEATED:
                    raise
                gone = error
            # all the same the call takes no longer than it may: others wait for whoever makes it
            if path not in NOT_TWICE and broken < BROKEN and self._answers() and answer.remaining_s:
                broken += 1
                logger.warning("%s; it answers, and is asked again (%d of %d)", gone, broken, BROKEN)
                continue
            if self.successors is None:
                raise gone
            deadline = deadline or self._for_successor(self.successors.within_s)
            address = self.successors.of(self.address, self._answers, deadline, str(gone))
            if address is None:
                raise gone
            logger.warning("%s; asking the one that was started in its place", gone)
            self.address, answer = address, self._for_answer(path, timeout_s)

    @staticmethod
    def _for_answer(path: Endpoint, within_s: float) -> Deadline:
        return Deadline(f"the rollout role to answer {path}", within_s)

    @staticmethod
    def _for_successor(within_s: float) -> Deadline:
        return Deadline("another rollout role in the place of the one that ended", within_s)

    def _answers(self) -> bool:
        try:
            self._once("GET", Endpoint.HEALTH, b"", LIVES_S)
        except (ServiceFailed, DeadlineExceeded):
            return False
        return True

    def _once(self, method: str, path: Endpoint, body: bytes, timeout_s: float) -> bytes:
        parts = urlsplit(self.address.url)
        host, port = parts.hostname or "", parts.port or 80
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        headers = {TOKEN_HEADER: self.address.token, "Content-Type": "application/msgpack"}
        try:
            connection.request(method, str(path), body, headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            raise DeadlineExceeded(f"waited {timeout_s:.4g} s for the rollout role to answer {path}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RoleGone(
                f"{path}: the rollout role at {host}:{port} cannot be reached ({error!r}); has it ended?"
            ) from None
        finally:
            connection.close()
        if response.status >= 400:
            # 401: its port is another role's now
            failed = RoleGone if response.status == http.HTTPStatus.UNAUTHORIZED else ServiceFailed
            raise failed(f"{path}: refused with {response.status}: {_reason(content)}")
        return content


def _reason(content: bytes) -> str:
    try:
        return decode(content, Refusal).error
    except msgspec.MsgspecError:
        return json.dumps(content[:300].decode(errors="replace"))
