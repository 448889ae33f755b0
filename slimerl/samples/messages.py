"""The wire between the roles: what the rollout role's control service takes and gives.

Metadata (`BatchManifest` of `SampleMeta`) travels apart from payload (`SamplePayload`): a step is planned from
metadata alone, and each data-parallel leader fetches the payload of its own samples.
All messages are msgpack (`encode`, `decode`); every request carries the header `TOKEN_HEADER`.
"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path as FilePath
from typing import TypeVar

import msgspec
import numpy as np

TOKEN_HEADER = "x-slimerl-token"
ADDRESS_FILE = "rollout.json"
"""In the run directory, mode 0600: `ServiceAddress` as JSON, written once the service listens."""
GATEWAY_FILE = "gateway.json"
"""The same of the gateway; its token is the key that agent programs show."""

Message = TypeVar("Message")


class Path(StrEnum):
    """Paths of the control service."""

    HEALTH = "/health"
    STATUS = "/status"
    ENGINES = "/engines"
    REGISTER_ENGINE = "/engines/register"
    ENGINE_LOST = "/engines/lost"
    HOLD = "/weights/hold"
    RELEASE = "/weights/release"
    NEXT_BATCH = "/batches/next"
    BATCH_TRAINED = "/batches/trained"
    FETCH_SAMPLES = "/samples/fetch"
    EVALUATE = "/evaluate"
    BEGIN_EVALUATION = "/evaluate/begin"
    EVALUATE_PART = "/evaluate/part"
    STATE = "/state"
    RESTORE = "/state/restore"
    BEGIN_ANEW = "/state/begin-anew"
    LEDGER_JOIN = "/ledger/join"
    LEDGER_REPORT = "/ledger/report"
    SHUTDOWN = "/shutdown"


class ServiceAddress(msgspec.Struct, frozen=True):
    url: str
    token: str
    pid: int


def address_file(shard: int = 0) -> str:
    """Name of the file in which the rollout process of this number announces itself."""
    return f"rollout-{shard}.json" if shard else ADDRESS_FILE


def gateway_file(shard: int = 0) -> str:
    """As `address_file`, of the gateway."""
    return f"gateway-{shard}.json" if shard else GATEWAY_FILE


def process_of_engine(index: int, processes: int) -> int:
    """Number of the rollout process that has the engine `engine-INDEX`."""
    return index % processes


def process_of(engine_id: str, processes: int) -> int:
    """As `process_of_engine`, by the engine's name."""
    return process_of_engine(int(engine_id.removeprefix("engine-")), processes)


def read_address(run_dir: FilePath, shard: int = 0) -> ServiceAddress:
    """Of a rollout process of a run. Raises OSError: it has not announced itself, or what is there is no address."""
    return address_in(run_dir / address_file(shard))


def address_in(file: FilePath) -> ServiceAddress:
    """Of a file of `address_file` or `gateway_file`. Raises OSError: it is not there, or holds no address."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ServiceAddress)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OSError(f"{file} holds no address of a rollout role: {error}") from None


class EngineState(StrEnum):
    JOINING = "joining"
    """Registered, holds no verified weights yet."""
    STALE = "stale"
    """Whole, but of an older version than required."""
    SERVING = "serving"
    DRAINING = "draining"
    DIRTY = "dirty"
    """A weight update failed half-way: paused, never routed to, until a full verified rewrite."""
    DEAD = "dead"


class EngineInfo(msgspec.Struct, frozen=True):
    engine_id: str
    url: str
    admin_key: str
    tensor_parallel: int
    state: EngineState = EngineState.JOINING
    version: int = -1


class EngineLost(msgspec.Struct, frozen=True):
    """An engine has ended; it is expected to register again within `returns_s`, 0: never."""

    engine_id: str
    reason: str
    returns_s: float


class HoldRequest(msgspec.Struct, frozen=True):
    """Stop dispatching, so that `version` can be written; the lease ends by itself after `lease_s`."""

    version: int
    lease_s: float


class HoldReply(msgspec.Struct, frozen=True):
    lease_id: str
    engines: list[EngineInfo]
    pause: str = "retract"
    """A `PauseMode`: what becomes of requests that still run."""


class ReleaseRequest(msgspec.Struct, frozen=True):
    """End a hold: `whole` engines serve `version`; `dirty` ones (id → reason) are quarantined."""

    lease_id: str
    version: int
    whole: list[str]
    dirty: dict[str, str] = {}


class NextBatchRequest(msgspec.Struct, frozen=True):
    step: int
    timeout_s: float


class SampleMeta(msgspec.Struct, frozen=True):
    sample_id: str
    group_id: str
    prompt_length: int
    response_length: int
    sampled_length: int
    oldest_version: int
    newest_version: int
    reward: float
    correct: bool | None
    finish_reason: str
    prompt_hash: int | None = None
    """Equal for equal prompts. Those of a group are, but for samples that an agent loop gave a prompt of their own."""


class BatchManifest(msgspec.Struct, frozen=True, tag=True):
    """The samples of one training step, whole groups, and what the rollout measured while making them."""

    batch_id: str
    step: int
    samples: list[SampleMeta]
    metrics: dict[str, float] = {}
    shards: dict[str, int] = {}
    """Where several rollout processes make samples: which of them holds those of a group, by its id."""


class SyncWanted(msgspec.Struct, frozen=True, tag=True):
    """Instead of what was asked for: these engines have registered again, and serve after a sync of the present
    version. Ask again after it."""

    engines: list[str]


class BatchTrained(msgspec.Struct, frozen=True):
    batch_id: str
    version: int


class FetchRequest(msgspec.Struct, frozen=True):
    sample_ids: list[str]


class SamplePayload(msgspec.Struct, frozen=True):
    """One sample's arrays as little-endian bytes: tokens int32 (prompt + response); the rest per response
    token: sampled uint8, behavior_logprobs float32, versions int32. `routing`: int16, one row for each token, or
    nothing where none was asked for; see `Sample.routing`."""

    sample_id: str
    prompt_length: int
    tokens: bytes
    sampled: bytes
    behavior_logprobs: bytes
    versions: bytes
    routing: bytes = b""

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.tokens) + len(self.sampled) + len(self.behavior_logprobs) + len(self.versions)


class EvaluateRequest(msgspec.Struct, frozen=True):
    step: int
    timeout_s: float


class EvaluateReply(msgspec.Struct, frozen=True, tag=True):
    """Of `data.eval_path` the accuracy and what it is of; `figures`: `eval/…`, of every set."""

    step: int
    version: int
    accuracy: float
    prompts: int
    failures: int
    """Prompts whose generation or reward failed; they are not counted as wrong answers."""
    mean_response_tokens: float
    seconds: float
    figures: dict[str, float] = {}


class SavedSample(msgspec.Struct, frozen=True):
    """What a sample has: all of it, or, without a `reward`, what was generated so far."""

    payload: SamplePayload
    prompt_id: str
    reward: float | None
    correct: bool | None
    finish_reason: str | None


class SavedGroup(msgspec.Struct, frozen=True):
    """A group that no step has trained. `version`: at its admission; `sample_ids`: of all that were not dropped, in
    order; `samples`: those of them that were finished; `begun`: those with some tokens. The rest is made again."""

    group_id: str
    version: int
    sample_ids: list[str]
    samples: list[SavedSample]
    begun: list[SavedSample] = []

    @property
    def missing(self) -> list[str]:
        """Ids of the samples that are not finished."""
        finished = {sample.payload.sample_id for sample in self.samples}
        return [sample_id for sample_id in self.sample_ids if sample_id not in finished]


class RolloutState(msgspec.Struct, frozen=True):
    """What the rollout role has to know to go on after `steps` trained steps.

    Prompts drawn so far, samples by what became of them, drops that a manifest has told of, live groups in admission
    order. Seeds are functions of ids, and need not be kept.
    """

    steps: int
    cursor: int
    trained: int
    dropped: dict[str, int]
    dropped_told: dict[str, int]
    groups: list[SavedGroup]


class Status(msgspec.Struct, frozen=True):
    """Conservation: admitted = trained + buffered + running + dropped (sum over reasons), in samples."""

    version: int
    admitted: int
    running: int
    buffered: int
    trained: int
    dropped: dict[str, int]
    engines: list[EngineInfo]
    returning: list[str] = []
    """Engines that ended and are being started again."""
    evaluating: list[int] = []
    """Steps whose evaluation was begun, has no result yet and may still have one."""


class Refusal(msgspec.Struct, frozen=True):
    """Body of every answer with a status ≥ 400."""

    error: str


def encode(message: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """Raises msgspec.DecodeError or msgspec.ValidationError when the bytes are not such a message."""
    return msgspec.msgpack.decode(data, type=kind)


def pack_array(values: Sequence, dtype: str) -> bytes:
    return np.asarray(values, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()


def unpack_array(data: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"))
