"""The paths of the spec as the file system takes them: what is there can be read, what is to be written can be asked
about. All other checks of files rely on it and wait until it finds nothing.

Flows in: the spec. Flows out: one line for each path that the file system refuses. That nothing is there is no matter
here: the checks of model, data and disk say what should be.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from slimerl.conductor.run_directory import holds_other_files
from slimerl.spec import RunSpec
from slimerl.spec.reward import JudgeReward, ModelReward, single_rewards
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR, COMPANIONS

_READ = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".safetensors", ".distcp")
"""Of a checkpoint directory; other files in it are nobody's concern."""
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_LONGEST_NAME = 255
"""Bytes of one part of a path, on every file system in use."""
_SHOWN = 200


def path_faults(spec: RunSpec) -> list[str]:
    """Of inputs first, then of what is written."""
    faults = [fault for key, path in _inputs(spec) for fault in _input_faults(key, path)]
    export = "output_dir" if spec.training.export_path is None else "training.export_path"
    outputs = [("output_dir", spec.run_dir), ("output_dir", spec.run_dir / CHECKPOINTS_DIR), (export, spec.export_dir)]
    if spec.checkpoint.local_dir is not None:
        outputs.append(("checkpoint.local_dir", spec.checkpoint.local_dir))
    for key, path in outputs:
        if not any(fault.startswith(f"{key}: ") for fault in faults):
            faults += _output_faults(key, path)
    if not faults and holds_other_files(spec.run_dir):
        faults.append(f"output_dir: {spec.run_dir} holds files that are no run's; set it to a directory of its own")
    return faults


def _inputs(spec: RunSpec) -> Iterator[tuple[str, Path]]:
    named = {
        "model.path": spec.model.path,
        "model.megatron_path": spec.model.megatron_path,
        "engine.model_path": spec.engine.model_path if spec.uses_engines else None,
        "algorithm.teacher_path": spec.algorithm.teacher_path,
        "data.train_path": spec.data.train_path,
        "data.eval_path": spec.data.eval_path,
        "training.critic.path": spec.critic_path if spec.critic_path != spec.model.path else None,
    }
    yield from ((key, path) for key, path in named.items() if path is not None)
    yield from ((key, path) for key, path in spec.input_paths.items() if key.startswith("evaluation."))
    for where, reward in single_rewards(spec.reward) if spec.uses_engines else ():
        if isinstance(reward, JudgeReward):
            yield f"{where}.rubric_path", reward.rubric_path
        if isinstance(reward, ModelReward):
            yield f"{where}.path", reward.path


def _input_faults(key: str, path: Path) -> Iterator[str]:
    try:
        files = [path]
        if path.is_dir():
            folders = [path, *(each for each in (path / COMPANIONS,) if each.is_dir())]
            files = [file for each in folders for file in sorted(each.iterdir()) if file.suffix in _READ]
    except OSError as error:
        yield f"{key}: {_refused(path, error)}; mend that, or set {key} to another place"
        return
    for file in files:
        try:
            # not to be waited for, should it be a pipe
            descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
            mode = os.fstat(descriptor).st_mode
            os.close(descriptor)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                yield f"{key}: {_refused(file, error)}; mend that, or set {key} to another place"
                return
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            yield f"{key}: {_short(str(file))} is a pipe or a device, and is to be read more than once; name a file"
            return


def _output_faults(key: str, path: Path) -> Iterator[str]:
    """What would keep a directory of this name from being asked about or made."""
    away = f"set {key} to another place"
    if long := [part for part in path.parts if len(os.fsencode(part)) > _LONGEST_NAME]:
        yield f"{key}: the name {_short(long[0])} is longer than {_LONGEST_NAME} bytes; shorten it"
        return
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in _NOT_THERE:
            yield f"{key}: {_refused(path, error)}; {away}"
            return
    for each in (path.absolute(), *path.absolute().parents):
        if each.is_symlink() and not each.exists():
            yield f"{key}: {each} is a link to {each.readlink()}, which is not there; make that directory, or {away}"
            return


def _refused(path: Path, error: OSError) -> str:
    """The file that the system names, if it does."""
    return f"{_short(str(error.filename or path))} cannot be used ({error.strerror})"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
