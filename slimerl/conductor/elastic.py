"""Engines that come and go while a run goes on, by command or by load (`elastic_by_load.py`).

Flows in: a request; that of a command is a file in RUN_DIR/engine_requests that appears whole. Flows out: engine
roles, started or ended by the conductor and recorded, and its answer, for a command beside the request.
Invariants: an engine that was added serves after a weight sync; the requests of one that is removed go on elsewhere,
and the last one stays. A run that starts over has the engines of its spec.
"""

import itertools
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from slimerl.conductor.restarts import has_cuda, tell_lost
from slimerl.conductor.roles import Roles
from slimerl.conductor.step import start_role
from slimerl.conductor.supervise import RoleProcess, end_all
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import EngineLost, process_of
from slimerl.spec import RunSpec
from slimerl.spec.evaluation_engines import evaluation_engines
from slimerl.telemetry.run_log import RESIZED, append_event, newest_step

REQUESTS_DIR = "engine_requests"
POLL_S = 0.1
_REQUEST, _ANSWER = ".request", ".answer"


class EngineRequest(msgspec.Struct, frozen=True):
    """`add`: how many; `remove`: which."""

    add: Annotated[int, msgspec.Meta(ge=0)] = 0
    remove: list[str] = []


class EngineAnswer(msgspec.Struct, frozen=True):
    """`refused`: why nothing was done; else which engines were started or ended."""

    engines: list[str] = []
    refused: str = ""


def ask(run_dir: Path, request: EngineRequest, timeout_s: float) -> EngineAnswer:
    """From another process: let the conductor of a run do it. Raises DeadlineExceeded: it does not answer."""
    directory = run_dir / REQUESTS_DIR
    directory.mkdir(exist_ok=True)
    name = directory / uuid.uuid4().hex
    part, asked, answer = (name.with_suffix(suffix) for suffix in (".part", _REQUEST, _ANSWER))
    part.write_bytes(msgspec.json.encode(request))
    part.rename(asked)
    deadline = Deadline(f"the conductor of {run_dir} to answer", timeout_s)
    try:
        why = "does `slimerl run` run it? Roles that were started one by one have no conductor"
        deadline.wait_until(answer.exists, POLL_S, lambda: why)
        return msgspec.json.decode(answer.read_bytes(), type=EngineAnswer)
    finally:
        asked.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)


class ElasticEngines:
    """The conductor's side."""

    def __init__(self, commands: Roles, say: Callable[[str], None]) -> None:
        self._spec, self._commands, self._say = commands.spec, commands, say

    def serve(self, roles: list[RoleProcess]) -> None:
        """Look for requests, and do what they ask."""
        for asked in sorted((self._spec.run_dir / REQUESTS_DIR).glob(f"*{_REQUEST}")):
            try:
                request = msgspec.json.decode(asked.read_bytes(), type=EngineRequest)
            except (OSError, msgspec.MsgspecError) as error:
                answer = EngineAnswer(refused=f"this is no request: {error}")
            else:
                answer = self.change(request, roles, "by command")
            part = asked.with_suffix(".part")
            part.write_bytes(msgspec.json.encode(answer))
            asked.unlink(missing_ok=True)
            part.rename(asked.with_suffix(_ANSWER))

    def change(self, request: EngineRequest, roles: list[RoleProcess], why: str) -> EngineAnswer:
        """Do what is asked, or say why not. `why`: it is asked, for people and the record."""
        if refused := self._refusal(request, roles):
            return EngineAnswer(refused=refused)
        removed = self._remove(request.remove, roles, why)
        return EngineAnswer([*self._add(request.add, roles, why), *removed])

    def _refusal(self, request: EngineRequest, roles: list[RoleProcess]) -> str:
        running, elastic = engine_ids(roles), self._spec.engine.elastic
        if not running:
            return "this run has no engines: its algorithm reads its responses from the data"
        if unknown := [name for name in request.remove if name not in running]:
            return f"no engine {', '.join(unknown)} runs; there are {', '.join(running)}"
        evaluators = {f"engine-{number}" for number in evaluation_engines(self._spec)}
        if asked := sorted(evaluators & set(request.remove)):
            return f"{', '.join(asked)} evaluates alone, and the run counts on it: evaluation.engines"
        if request.remove and set(request.remove) == set(running) - evaluators:
            return "that is every engine; one must stay"
        if request.remove and (bereft := self._bereft(set(running) - set(request.remove))):
            return bereft
        after = len(running) + request.add - len(set(request.remove))
        if elastic is not None and not elastic.min <= after <= elastic.max:
            return (
                f"that would be {after} engines, and engine.elastic keeps {elastic.min} to {elastic.max}; start the "
                "run with other bounds"
            )
        return self._no_room(request.add, after) if request.add else ""

    def _no_room(self, more: int, after: int) -> str:
        """For `more` engines, `after` in all."""
        cuda, places = has_cuda(), self._commands.engine_places
        if self._spec.takes_turns(cuda):
            where = " on the same GPUs" if cuda else ""
            return (
                f"engines take turns with the trainer{where}, which may have its turn now; for engines that come and "
                "go set cluster.placement: disaggregated"
            )
        if places is not None and after > places:
            return f"the job has nodes for {places} engines; submit it with more engine.replicas or engine.elastic.max"
        if cuda:
            return self._no_gpus(after)
        # of a job it would be the memory of this node, which may have none of the engines
        return self._too_large(more) if places is None else ""

    def _bereft(self, left: Collection[str]) -> str:
        """Of several rollout processes each must keep an engine: nobody else makes what it was told to."""
        processes = self._spec.rollout.processes
        without = sorted(set(range(processes)) - {process_of(name, processes) for name in left})
        if not without:
            return ""
        return f"that leaves rollout process {without[0]} of {processes} without an engine; add one first, or keep one"

    def _no_gpus(self, after: int) -> str:
        """For so many engines."""
        if after > self._spec.engine.most_replicas:
            return (
                f"this run has GPUs for {self._spec.engine.most_replicas} engines; raise engine.replicas, or set "
                "engine.elastic.max"
            )
        return ""

    def _too_large(self, more: int) -> str:
        """For the memory of a machine without CUDA."""
        # here: they import PyTorch, and this module in turn
        from slimerl.conductor.preflight.machine import available_memory_bytes
        from slimerl.training.memory_estimate import GIB

        with_them = self._spec.engine.model_copy(update={"replicas": self._spec.engine.replicas + more})
        larger = self._spec.model_copy(update={"engine": with_them})
        try:
            needed = _host_bytes(larger) - _host_bytes(self._spec)
        except ValueError as error:
            return f"what {more} more would need cannot be told: {error}"
        if needed <= (available := available_memory_bytes()):
            return ""
        return (
            f"{more} more would need about {needed / GIB:.1f} GiB of memory, {available / GIB:.1f} GiB are available; "
            "add fewer, or end other programs"
        )

    def _add(self, count: int, roles: list[RoleProcess], why: str) -> list[str]:
        added = []
        for _ in range(count):
            # the lowest free number: it is also the place on the GPUs
            commands = map(self._commands.engine, itertools.count())
            command = next(one for one in commands if one.engine_id not in engine_ids(roles))
            # before the trainer, which leads
            roles.insert(-1, start_role(command, self._spec.run_dir / "logs"))
            self._note(f"{command.name} is added ({why}); it serves after a weight sync")
            added.append(command.name)
        return added

    def _remove(self, names: list[str], roles: list[RoleProcess], why: str) -> list[str]:
        removed = [role for role in roles if role.role.engine_id in names]
        for role in removed:
            tell_lost(self._spec, EngineLost(role.role.name, f"removed ({why})", 0.0))
            roles.remove(role)
        # all at once: whoever asked waits no longer than for one
        end_all(removed, self._spec.deadlines.shutdown_s)
        for role in removed:
            self._note(f"{role.role.name} is removed ({why}); its requests go on elsewhere")
        return [role.role.name for role in removed]

    def _note(self, text: str) -> None:
        self._say(text)
        append_event(self._spec.run_dir, max(0, newest_step(self._spec.run_dir)), "note", RESIZED, text)


def engine_ids(roles: Sequence[RoleProcess]) -> list[str]:
    """Of those that were started and not removed, the newest last."""
    return [role.role.engine_id for role in roles if role.role.engine_id is not None]


def _host_bytes(spec: RunSpec) -> int:
    """Of all roles together. Raises ValueError: the model's `config.json` can no longer be read."""
    from slimerl.conductor.estimate import estimate
    from slimerl.training.capabilities import detect
    from slimerl.training.engine_layout import engine_config
    from slimerl.training.model_config import read_config

    config = read_config(spec.model.path)
    return estimate(spec, config, detect(), engine_config(spec, config)).host
