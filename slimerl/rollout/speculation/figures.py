"""What speculation did since the last batch, for the metrics.

Flows in: each draft's fate. Flows out: `speculation/…` figures. Fewer decoded tokens alone prove nothing: what was
prefilled for it, and the time that took, stand beside.
"""

from dataclasses import dataclass, field

import numpy as np

from slimerl.rollout.speculation.rules import Array, lenient_bias


@dataclass
class Figures:
    requests: int = 0
    drafts: int = 0
    drafted: int = 0
    """Tokens of drafts that were scored."""
    accepted: int = 0
    decoded: int = 0
    """Tokens that engines generated one by one, those behind rejections included."""
    prefilled: int = 0
    """Tokens of inputs, drafts among them, whose KV the engines did not have."""
    discarded: int = 0
    """Drafts whose scores came from other weights than the present ones, or not at all."""
    gated: int = 0
    """Requests that went without a draft since too many were running."""
    seconds: float = 0.0
    """That requests spent on drafts, summed over requests that ran side by side."""
    _pairs: list[tuple[Array, Array]] = field(default_factory=list)
    """Of the lenient tier's drafts: log-probabilities now, and when they were drawn."""

    def compared(self, new: Array, old: Array) -> None:
        self._pairs.append((new, old))

    def take(self, lenience: float | None) -> dict[str, float]:
        """Figures since the last call; `lenience`: of the lenient tier alone."""
        now = Figures(**{name: getattr(self, name) for name in _COUNTED})
        pairs, self._pairs = self._pairs, []
        for name in _COUNTED:
            setattr(self, name, type(getattr(self, name))())
        figures = {f"speculation/{name}{unit}": float(getattr(now, name)) for name, unit in _COUNTED.items()}
        figures["speculation/accepted_fraction"] = now.accepted / now.drafted if now.drafted else 0.0
        generated = now.accepted + now.decoded
        figures["speculation/reused_fraction"] = now.accepted / generated if generated else 0.0
        if lenience is not None:
            new, old = (np.concatenate([pair[side] for pair in pairs] or [np.zeros(0)]) for side in (0, 1))
            figures["speculation/logprob_gap"] = float(np.abs(new - old).mean()) if len(new) else 0.0
            figures["speculation/bias_estimate"] = lenient_bias(new, old, lenience)
        return figures


_COUNTED = {
    "requests": "",
    "drafts": "",
    "drafted": "_tokens",
    "accepted": "_tokens",
    "decoded": "_tokens",
    "prefilled": "_tokens",
    "discarded": "_drafts",
    "gated": "_requests",
    "seconds": "",
}
"""Counter → what stands behind its name."""
