"""The reward: can it judge here, and is the data made for it?

Flows in: the spec. Flows out: faults by key, of the data by file and line. A sandbox is really made, and a function
really loaded; remote services are not asked, since they may start later than this.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from slimerl.conductor.preflight import machine
from slimerl.conductor.preflight.scored import reward_model_faults
from slimerl.rewards.code import parse_tests
from slimerl.rewards.hooks import PARAMETERS
from slimerl.rewards.language_judge import rubric_fault
from slimerl.rewards.remote import missing_token
from slimerl.rollout.prompts import scan_file
from slimerl.samples.rows import shown_faults
from slimerl.spec import RunSpec
from slimerl.spec.functions import CustomFunctionError, load_function
from slimerl.spec.reward import (
    AnyReward,
    CodeReward,
    FunctionReward,
    HttpReward,
    JudgeReward,
    ModelReward,
    ServedModelReward,
    single_rewards,
)

_GIB = 2**30
_PROBE_S = 60.0


def reward_faults(spec: RunSpec) -> list[str]:
    """Nothing for a run that samples no responses."""
    if not spec.uses_engines:
        return []
    faults = []
    for where, reward in single_rewards(spec.reward):
        faults += [f"{where}.{fault}" for fault in _faults(reward)]
        if isinstance(reward, ModelReward):
            faults += [f"{where}.{fault}" for fault in reward_model_faults(spec, reward.path)]
    if any(isinstance(reward, CodeReward) for _, reward in single_rewards(spec.reward)):
        for path in (spec.data.train_path, spec.data.eval_path, *(one.path for one in spec.evaluation.sets)):
            if path is not None and path.is_file():
                faults += _test_faults(path)
    return faults


def sandbox_trouble() -> str | None:
    """Why no foreign program can be run here; None: one was. From a process of its own, which has one thread only."""
    command = [sys.executable, "-m", "slimerl.rewards.sandbox"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"the sandbox's own test did not end within {_PROBE_S:g} s"
    return ended.stderr.strip().rpartition("\n")[2] or f"exit code {ended.returncode}" if ended.returncode else None


def _faults(reward: AnyReward) -> Iterator[str]:
    """Each begins with the key."""
    if isinstance(reward, CodeReward):
        trouble = sandbox_trouble()
        if trouble is not None:
            yield f"kind: code is refused, since programs of the model would run without a sandbox: {trouble}"
        most = reward.workers * reward.processes * reward.memory_mib * 2**20
        if most > (available := machine.available_memory_bytes()):
            yield (
                f"memory_mib: {reward.workers} workers * {reward.processes} processes * {reward.memory_mib} MiB are "
                f"{most / _GIB:.1f} GiB, which programs may all use, and {available / _GIB:.1f} GiB are available; "
                "lower one of them"
            )
    if isinstance(reward, FunctionReward):
        try:
            load_function(reward.function, PARAMETERS, "function")
        except CustomFunctionError as error:
            yield str(error)
    if isinstance(reward, JudgeReward) and (fault := rubric_fault(reward.rubric_path)) is not None:
        yield f"rubric_path: {fault}"
    variable = reward.token_variable if isinstance(reward, HttpReward | ServedModelReward | JudgeReward) else None
    if variable is not None and not os.environ.get(variable):
        yield missing_token(variable)


def _test_faults(path: Path) -> list[str]:
    faults = []
    for row in scan_file(path)[0]:
        try:
            parse_tests(row.target)
        except ValueError as error:
            faults.append(f"{path}:{row.line}: reward.kind code: {error}")
    return shown_faults(faults)
