"""Engines by load: what `ElasticPolicy` says of the steps of a run is done as a command would be.

Flows in: the run's metrics as they grow. Flows out: engines, added or removed by `ElasticEngines`.
Invariant: each step is looked at once, and none of an earlier start, which had other engines.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from slimerl.conductor.elastic import ElasticEngines, EngineRequest, engine_ids
from slimerl.conductor.elastic_policy import Decision, ElasticPolicy, StepLoad
from slimerl.conductor.supervise import RoleProcess
from slimerl.spec import RunSpec
from slimerl.telemetry.progress import Tail
from slimerl.telemetry.run_log import METRICS_FILE


class EnginesByLoad:
    """Nothing where the spec has no `engine.elastic`."""

    def __init__(self, spec: RunSpec, engines: ElasticEngines, say: Callable[[str], None]) -> None:
        self._engines, self._say = engines, say
        elastic, steps = spec.engine.elastic, spec.training.steps
        self._policy = None if elastic is None else ElasticPolicy(elastic, spec.rollout.max_staleness > 0, steps)
        self._metrics = Tail(spec.run_dir / METRICS_FILE, from_end=True)
        self._since = time.time()
        self._told = ""

    def look(self, roles: list[RoleProcess]) -> None:
        """Look at the steps that have ended since the last call."""
        if self._policy is None:
            return
        for record in self._metrics.new():
            load = load_of(record)
            if load is not None and record["time"] >= self._since:
                self._do(self._policy.look(load, len(engine_ids(roles))), roles)

    def _do(self, decision: Decision, roles: list[RoleProcess]) -> None:
        if not decision.more:
            self._tell_once(decision.why, decision.why)
            return
        # the newest of them has the least in its cache that would be missed
        request = EngineRequest(add=1) if decision.more > 0 else EngineRequest(remove=engine_ids(roles)[-1:])
        if refused := self._engines.change(request, roles, decision.why).refused:
            self._tell_once("refused", f"{decision.why}; no engine is added: {refused}")
        else:
            self._told = ""

    def _tell_once(self, what: str, text: str) -> None:
        """Until engines change: the same may stand in the way at every step."""
        if what and what != self._told:
            self._say(text)
            self._told = what


def load_of(record: Mapping[str, Any]) -> StepLoad | None:
    """Of the metrics of a step; None: the record is of something else."""
    if not {"time/step", "rollout/engines", "rollout/engine_idle_share"} <= record.keys():
        return None
    waited = record.get("time/wait", 0.0) / record["time/step"]
    return StepLoad(record["step"], waited, record["rollout/engine_idle_share"], int(record["rollout/engines"]))
