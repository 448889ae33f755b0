"""What this machine can run, and why not: `slimerl doctor`.

Flows in: the machine. Flows out: one `Finding` per question. Invariant: nothing is changed, and each question is asked
of the machine itself (a version is the installed one, a namespace is one that was made).
"""

import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from slimerl.conductor.preflight.disk import free_bytes
from slimerl.conductor.preflight.machine import SHARED_MEMORY, available_memory_bytes
from slimerl.conductor.preflight.reward import sandbox_trouble
from slimerl.conductor.versions import ENGINE_PINS, TRAINER_PINS, installed, version_fault
from slimerl.rewards.sandbox.execution import REMEDY
from slimerl.training.memory_estimate import GIB

QUICKSTART_MEMORY_BYTES = 5 * GIB
QUICKSTART_SHARED_BYTES = 256 * 2**20
QUICKSTART_DISK_BYTES = GIB
OPEN_FILES = 1024
"""What a run with a few engines keeps open at most."""
PROBE_S = 180.0
"""Importing SGLang takes 7 s on an idle machine, and many times that on a busy one."""


@dataclass(frozen=True)
class Finding:
    """One answer. `meaning` and `fix` are empty where it is good."""

    name: str
    ok: bool
    found: str
    meaning: str = ""
    fix: str = ""
    needed: bool = False
    """The quickstart cannot run without it."""


def examine(directory: Path) -> list[Finding]:
    """Every finding; `directory` is where runs will be written. Takes some seconds: SGLang is really imported."""
    return [
        _python(),
        *_packages(),
        _engine_import(),
        _cuda(),
        *_accelerators(),
        _communication(),
        _torchrun(),
        _cores(),
        *_room(directory),
        _open_files(),
        _namespaces(),
        _slurm(),
    ]


def can_run_quickstart(findings: list[Finding]) -> bool:
    return all(finding.ok for finding in findings if finding.needed)


def report(findings: list[Finding], console: Console) -> None:
    """A line each, and the verdict."""
    for finding in findings:
        mark = Text("ok     ", "green") if finding.ok else Text("missing", "red" if finding.needed else "yellow")
        advice = "" if finding.ok else f" – {finding.meaning}; {finding.fix}"
        console.print(mark, f"{finding.name}: {finding.found}{advice}", markup=False, highlight=False, soft_wrap=True)
    missing = [finding.name for finding in findings if finding.needed and not finding.ok]
    verdict = f"no: see {', '.join(missing)}" if missing else "yes: bash launch/quickstart.sh"
    console.print(f"can the quickstart run here? {verdict}", highlight=False, soft_wrap=True)


def as_json(findings: list[Finding]) -> str:
    """For programs: {"quickstart": bool, "findings": [...]}."""
    tree = {"quickstart": can_run_quickstart(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(tree, indent=2)


def _python() -> Finding:
    found = platform.python_version()
    good = sys.version_info[:2] == (3, 11)
    return Finding(
        "Python", good, found, "SGLang and Megatron are pinned for 3.11", "start with PYTHON=/path/to/python3.11", True
    )


def _packages() -> list[Finding]:
    """torch is no question (this runs on it), but which build it is matters to the others."""
    return [Finding("torch", True, torch.__version__)] + [
        Finding(
            package,
            version_fault(package, pin) is None,
            installed(package) or "not installed",
            f"slimerl is written against {pin}",
            "bash launch/quickstart.sh installs it into .venv",
            needed=True,
        )
        for package, pin in (TRAINER_PINS | ENGINE_PINS).items()
    ]


def _engine_import() -> Finding:
    """In a process of its own: the stand-ins for CUDA's packages must not stay in this one."""
    shim = "" if torch.cuda.is_available() else "from slimerl.engine.inside.cpu_shim import install; install(); "
    command = [sys.executable, "-c", shim + "import sglang.srt.entrypoints.http_server"]
    trouble = _trouble(command)
    return Finding(
        "SGLang starts",
        trouble is None,
        trouble or "its server can be imported",
        "engines cannot start",
        "install requirements-sglang.txt and requirements-sglang-nodeps.txt as launch/install.sh does",
        needed=True,
    )


def _cuda() -> Finding:
    build = torch.version.cuda
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding("CUDA", True, f"{torch.cuda.device_count()}: {names} (torch for CUDA {build})")
    if build is None:
        fix = "with a GPU: pip install torch==2.13.0 from PyPI, then --no-build-isolation -r requirements-gpu.txt"
        found = f"torch {torch.__version__} is built without CUDA"
    else:
        fix, found = "look at nvidia-smi and CUDA_VISIBLE_DEVICES", f"torch is built for CUDA {build}, but sees no GPU"
    return Finding("CUDA", False, found, "everything runs on the CPU: small models only", fix)


def _accelerators() -> list[Finding]:
    """Optional packages, by what they are found with."""
    optional = {
        "transformer-engine": ("transformer_engine", "fused GPU kernels for training; without CUDA of no use"),
        "apex": ("fused_weight_gradient_mlp_cuda", "fused weight gradients on GPUs; torch's own serve instead"),
        "nvidia-resiliency-ext": (
            "nvidia_resiliency_ext",
            "hung ranks that no conductor watches are not killed; no checkpoint.local_copies; `slimerl run` needs none",
        ),
    }
    findings = []
    for package, (module, meaning) in optional.items():
        here = importlib.util.find_spec(module) is not None
        found = (installed(package) or "installed") if here else "not installed"
        findings.append(Finding(package, here, found, meaning, "see requirements-gpu.txt"))
    return findings


def _communication() -> Finding:
    backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    wanted = "nccl" if torch.cuda.is_available() else "gloo"
    found = ", ".join(name for name, here in backends.items() if here) or "none"
    meaning = f"trainer ranks speak {wanted} here"
    return Finding("torch.distributed", backends[wanted], found, meaning, "install another build of torch", True)


def _torchrun() -> Finding:
    here = importlib.util.find_spec("torch.distributed.run") is not None
    return Finding(
        "torchrun", here, "present" if here else "absent", "starts the trainer's ranks", "install torch", True
    )


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    return Finding(
        "cores", usable >= 2, str(usable), "trainer and engine share one core: expect twice the time", "give it two"
    )


def _room(directory: Path) -> list[Finding]:
    def finding(name: str, free: int, wanted: int, meaning: str, fix: str) -> Finding:
        return Finding(name, free >= wanted, f"{free / GIB:.1f} GiB", f"{meaning} {wanted / GIB:.2g} GiB", fix, True)

    return [
        finding("memory", available_memory_bytes(), QUICKSTART_MEMORY_BYTES, "the quickstart takes", "end programs"),
        finding(
            str(SHARED_MEMORY),
            free_bytes(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else 0,
            QUICKSTART_SHARED_BYTES,
            "weights travel through it; the quickstart takes",
            "mount it larger (docker run --shm-size 1g)",
        ),
        finding("disk", free_bytes(directory), QUICKSTART_DISK_BYTES, "a run's record takes", "make room"),
    ]


def _open_files() -> Finding:
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding(
        "open files",
        limit >= OPEN_FILES,
        str(limit),
        "engines and workers may run out",
        f"ulimit -n {min(hard, 65536)}",
    )


def _namespaces() -> Finding:
    """For rewards that run foreign code: a program is run in the sandbox itself."""
    trouble = sandbox_trouble()
    return Finding(
        "user namespaces",
        trouble is None,
        trouble or "a sandboxed program ran",
        "no sandbox for rewards that run programs (reward.kind: code)",
        REMEDY,
    )


def _slurm() -> Finding:
    found = shutil.which("sbatch")
    return Finding("SLURM", found is not None, found or "no sbatch", "only one machine at a time", "run where SLURM is")


def _trouble(command: list[str]) -> str | None:
    """The last line of what a failing command says; None: it ended well."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_S:g} s"
    if ended.returncode == 0:
        return None
    lines = ended.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {ended.returncode}"
