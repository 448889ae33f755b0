"""Start, watch and stop one SGLang server.

Flows in: the run spec and the engine's index. Flows out: a process that serves on the loopback interface, with an
admin key of its own. Command line and environment are pure functions of (spec, device), so that both the CPU's and
the GPU's can be read and tested anywhere. Invariants: without CUDA the shim reaches the server's processes alone; no
process, port or shared memory of the server outlives this process.
"""

import asyncio
import ctypes
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import psutil

from slimerl.engine.client import EngineClient
from slimerl.engine.inside.serve import KEY_VARIABLE
from slimerl.engine.local_resources import LOOPBACK, PrivateDirectory, ReservedPort, own_address
from slimerl.engine.nccl_settings import NCCL_SETTINGS
from slimerl.engine.protocol import LOADER, UNVERIFIED_VERSION, SamplingParams
from slimerl.resilience.deadline import Deadline
from slimerl.resilience.kernel_caches import bounded_kernel_caches
from slimerl.resilience.name_lookups import bounded_lookups
from slimerl.resilience.processes import end_tree
from slimerl.spec import RunSpec
from slimerl.spec.engine import EngineSpec

_POLL_S = 0.2
_PROBE_TIMEOUT_S = 5.0
_STOP_GRACE_S = 3.0
_TAIL_LINES = 20
_MEETING_PORT = 19_999
"""Where the machines of one engine meet: on its first one, below the ports of `ReservedPort`."""


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Place:
    """Where a server's processes stand."""

    address: str = LOOPBACK
    """Of this machine, for the rollout role and the trainer."""
    node: int = 0
    """Which of the engine's machines this is, where its GPUs are on several."""
    head: str = ""
    """Address of the first of these."""


class ServerFailed(RuntimeError):
    """The server ended, or never came up; the message ends with the tail of its log."""


def detect_device() -> Device:
    """CUDA where both a GPU and a torch built for it are here. Asks the driver: importing torch takes seconds."""
    if "+cpu" in version("torch"):
        return Device.CPU
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Device.CPU
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return Device.CUDA if found else Device.CPU


def server_arguments(spec: RunSpec, index: int, device: Device, port: int, place: Place = Place()) -> list[str]:
    """Arguments of `sglang.launch_server` for engine `index`; `spec.engine.extra_args` come last and win."""
    engine = spec.engine
    arguments = {
        "--model-path": str(engine.model_path or spec.model.path),
        "--host": place.address,
        "--port": str(port),
        "--tp-size": str(engine.tensor_parallel),
        "--dtype": {"fp32": "float32", "bf16": "bfloat16"}[spec.model.dtype],
        "--context-length": str(engine.context_tokens),
        "--max-total-tokens": str(engine.max_total_tokens),
        "--max-running-requests": str(spec.rollout.max_running_requests),
        "--random-seed": str(spec.seed + index),
        "--custom-weight-loader": LOADER,
        "--log-level-http": "warning",  # otherwise a line for every request
        **_layout_arguments(engine),
        **_drafting_arguments(engine),
        **_node_arguments(spec, place),
        **(_CPU_ARGUMENTS if device is Device.CPU else _cuda_arguments(spec, index)),
    }
    flags = [
        # Written with "=", or argparse takes the minus for an option.
        f"--weight-version={UNVERIFIED_VERSION}",
        # SGLang's own warm-up starts with sleeping; `wait_until_healthy` does what is left of it.
        "--skip-server-warmup",
        "--sleep-on-idle",
        # Events of a stream hold what is new, not every time all that there is.
        "--incremental-streaming-output",
    ]
    if spec.algorithm.routing_replay == "r3":
        flags.append("--enable-return-routed-experts")
    if device is Device.CUDA:
        # Kernels whose result for a request does not depend on the batch around it, and sampling keyed by
        # `sampling_seed`. SGLang takes an attention backend that can do so, and a fixed order of NCCL's sums.
        flags.append("--enable-deterministic-inference")
        # With EP 1 it would make the shared expert of DeepSeek and GLM one more routed expert; the layout that the
        # sync plans for keeps it apart.
        flags.append("--disable-shared-experts-fusion")
        if spec.shares_gpus:
            flags.append("--enable-memory-saver")
    return [part for pair in arguments.items() for part in pair] + flags + list(engine.extra_args)


_CPU_ARGUMENTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--mem-fraction-static": "0.2",
    "--cuda-graph-backend-decode": "disabled",
    "--cuda-graph-backend-prefill": "disabled",
}


def _layout_arguments(engine: EngineSpec) -> dict[str, str]:
    """How the model lies on the engine's GPUs: as `training/engine_layout.py` tells the sync. Only what is asked for:
    SGLang without CUDA knows none of it."""
    sizes = {
        "--ep-size": engine.expert_parallel,
        "--attn-dp-size": engine.data_parallel_attention,
    }
    arguments = {name: str(size) for name, size in sizes.items() if size > 1}
    return arguments | ({"--moe-dense-tp-size": "1"} if engine.replicated_mlp else {})


def _drafting_arguments(engine: EngineSpec) -> dict[str, str]:
    """Of the engine's own speculative decoding."""
    drafting = engine.drafting
    if drafting is None:
        return {}
    arguments = {
        "--speculative-algorithm": {"mtp": "NEXTN", "eagle": "EAGLE", "eagle3": "EAGLE3"}[drafting.method],
        "--speculative-num-steps": str(drafting.steps),
        "--speculative-eagle-topk": str(drafting.branches),
        "--speculative-num-draft-tokens": str(drafting.draft_tokens),
    }
    own_model = {} if drafting.model_path is None else {"--speculative-draft-model-path": str(drafting.model_path)}
    return arguments | own_model


def _node_arguments(spec: RunSpec, place: Place) -> dict[str, str]:
    """Of an engine whose GPUs are on several machines."""
    if spec.nodes_per_engine == 1:
        return {}
    return {
        "--nnodes": str(spec.nodes_per_engine),
        "--node-rank": str(place.node),
        "--dist-init-addr": f"{place.head}:{_MEETING_PORT}",
    }


def _cuda_arguments(spec: RunSpec, index: int) -> dict[str, str]:
    arguments = {"--base-gpu-id": str(spec.first_gpu(index))}
    if spec.model.dtype == "fp32":
        # Of the backends that deterministic inference allows, the others take 16 bits only.
        arguments["--attention-backend"] = "triton"
    return arguments


def server_environment(spec: RunSpec, device: Device, key: str, private_dir: Path) -> dict[str, str]:
    """What the server's environment has beyond the inherited one."""
    environment = {
        KEY_VARIABLE: key,
        "TMPDIR": str(private_dir),
        "TOKENIZERS_PARALLELISM": "false",
        **bounded_lookups(),
        # /health then answers from the server's state, also while paused, instead of generating a token each time.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if device is Device.CUDA:
        environment |= {name: os.environ.get(name, value) for name, value in NCCL_SETTINGS.items()}
    if spec.engine.replicated_mlp:
        environment["SGLANG_SHARED_EXPERT_TP1"] = "1"
    if device is Device.CPU:
        environment |= {
            **bounded_kernel_caches(),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": str(spec.engine.threads),
            # Waiting threads sleep. Spinning ones cost a factor of 20 where trainer and engine share the cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            "SGLANG_CPU_OMP_THREADS_BIND": _core_lists(spec.engine.tensor_parallel, spec.engine.threads),
        }
    return environment


def _core_lists(ranks: int, threads: int) -> str:
    """One list of cores per rank, "0,1|2,3"; SGLang wants it where ranks outnumber NUMA nodes."""
    cores = sorted(os.sched_getaffinity(0))
    groups = [[cores[(rank * threads + thread) % len(cores)] for thread in range(threads)] for rank in range(ranks)]
    return "|".join(",".join(map(str, sorted(set(group)))) for group in groups)


@dataclass
class Server:
    """A running server; `stop` it, or let this process end."""

    engine_id: str
    url: str
    admin_key: str
    log_path: Path
    process: subprocess.Popen[bytes]
    port: ReservedPort
    private_dir: PrivateDirectory

    def client(self, timeout_s: float) -> EngineClient:
        return EngineClient(self.engine_id, self.url, self.admin_key, timeout_s)

    def check_running(self) -> None:
        """Raises ServerFailed once the process has ended."""
        code = self.process.poll()
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ServerFailed(f"{self.engine_id}: the SGLang server {how}; the end of {self.log_path}:\n{self.tail()}")

    async def wait_until_healthy(self, deadline: Deadline) -> None:
        """Up, and able to generate a token.

        Raises:
            ServerFailed: the server ended first.
            DeadlineExceeded: it takes too long.
            EngineError: it is up, but cannot generate.
        """
        async with self.client(timeout_s=_PROBE_TIMEOUT_S) as client:
            while not await client.healthy():
                self.check_running()
                deadline.check(f"the end of {self.log_path}:\n{self.tail()}")
                await asyncio.sleep(_POLL_S)
            first_token = SamplingParams(max_new_tokens=1, temperature=0.0)
            await client.generate([0], first_token, timeout_s=max(_PROBE_TIMEOUT_S, deadline.remaining_s))
            await client.freeze_gc(timeout_s=max(_PROBE_TIMEOUT_S, deadline.remaining_s))

    def stop(self) -> None:
        """End the server's whole tree at once: at the end of a run nobody waits for its tokens any more."""
        workers = _descendants(self.process.pid)
        # The kernel kills the workers with it. Python's resource tracker, which ends by itself, must not be killed
        # too: it is what unlinks the server's semaphores from /dev/shm.
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(workers, timeout=_STOP_GRACE_S)
        for worker in alive:
            end_tree(worker.pid, grace_s=0.0)
        self.private_dir.remove()
        self.port.release()

    def tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def start_server(spec: RunSpec, index: int, device: Device, node: int = 0, head: str = "") -> Server:
    """Start the server of engine `index`, or this machine's part of it; it is not healthy yet.

    Args:
        node, head: as in `Place`.

    Raises:
        NoAddress: other machines could not reach this one.

    Its life is tied to the calling thread's: call this from the main thread.
    """
    engine_id = f"engine-{index}" if node == 0 else f"engine-{index}-node-{node}"
    place = Place(own_address(spec.cluster.network), node, head)
    log_path = spec.run_dir / "logs" / f"{engine_id}-server.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    key = secrets.token_hex(32)
    port = ReservedPort(place.address)
    private_dir = PrivateDirectory(engine_id)
    serve = [sys.executable, "-m", "slimerl.engine.inside.serve", str(os.getpid())]
    with open(log_path, "ab", opener=_owner_only) as log:
        process = subprocess.Popen(
            [*serve, *server_arguments(spec, index, device, port.number, place)],
            env={**os.environ, **server_environment(spec, device, key, private_dir.path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(engine_id, f"http://{place.address}:{port.number}", key, log_path, process, port, private_dir)


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
