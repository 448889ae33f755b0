"""Which weights the engines serve, for a process that takes over: what was released, and what may have changed since.

Flows in: holds, releases and doubts of the rollout role. Flows out: records of the journal; whether an engine that
registers again still has the weights that were proven. Pure.

Invariant: an engine is proven only where it is the very server that was released, says the version of that release,
and since then no hold was granted and it was not doubted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slimerl.samples.journal import Change, Distrusted, Held, Record, Released, Weights, unheard
from slimerl.samples.messages import EngineInfo


@dataclass
class ServedWeights:
    note: Callable[[Record], None] = unheard
    """Takes every record of the journal, before anybody learns of what it says."""
    weights: Weights = field(default_factory=Weights)
    """As of now."""

    def held(self, engine_ids: Sequence[str]) -> None:
        """They may be written to from now on."""
        self._add(Held(list(engine_ids)))

    def released(self, lease_id: str, version: int, keys: Mapping[str, str]) -> None:
        """A hold has ended. `keys`: engines that serve `version`, proven, each with its admin key, which is new with
        every start of a server; `lease_id`: empty where the lease ran out."""
        self._add(Released(lease_id, version, dict(keys)))

    def distrusted(self, engine_id: str) -> None:
        """Nobody knows what it holds until the next release that names it whole."""
        self._add(Distrusted(engine_id))

    @property
    def expected(self) -> list[str]:
        """Engines that the process before has held or released last."""
        return sorted({*self.weights.keys, *self.weights.held})

    def is_ended(self, lease_id: str, version: int) -> bool:
        """Was it this lease that the newest release has ended?"""
        return bool(lease_id) and (lease_id, version) == (self.weights.lease_id, self.weights.version)

    def proves(self, engine: EngineInfo) -> bool:
        """`engine`: as it registers, with the version that its server says."""
        weights = self.weights
        same_server = weights.keys.get(engine.engine_id) == engine.admin_key
        return same_server and not weights.held and engine.version == weights.version >= 0

    def _add(self, change: Change) -> None:
        self.weights = self.weights.after(change)
        self.note(change)
