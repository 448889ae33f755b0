"""How an engine's own drafts fare (`engine.drafting`), request by request, from what it says of each answer.

Flows in: completions. Flows out: `speculation/engine_…` figures.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from slimerl.rollout.dispatch import Completion, Dispatcher, GenerateRequest


@dataclass
class EngineDrafts:
    proposed: int = 0
    accepted: int = 0
    verified: int = 0
    """Passes of the model, each over one draft."""
    tokens: int = 0

    def note(self, completion: Completion) -> None:
        meta = completion.generation.meta
        if not meta.get("spec_verify_ct"):
            return
        self.proposed += int(meta.get("spec_num_proposed_drafts") or 0)
        self.accepted += int(meta.get("spec_num_correct_drafts") or 0)
        self.verified += int(meta["spec_verify_ct"])
        self.tokens += len(completion.generation.tokens)

    def take_figures(self) -> dict[str, float]:
        """Since the last call: the part of the draft tokens that was right, and tokens per pass of the model."""
        figures = {
            "speculation/engine_accepted_fraction": self.accepted / self.proposed if self.proposed else 0.0,
            "speculation/engine_tokens_per_pass": self.tokens / self.verified if self.verified else 0.0,
        }
        self.proposed = self.accepted = self.verified = self.tokens = 0
        return figures

    async def save(self, step: int) -> None:
        """Nothing of it outlives the process."""

    async def restore(self, step: int) -> None:
        """As `save`."""


def _nothing() -> None:
    pass


@dataclass
class WatchedDispatcher(Dispatcher):
    """A `Dispatcher` that notes how the engines' drafts fared."""

    drafts: EngineDrafts = field(kw_only=True)

    async def generate(
        self, request: GenerateRequest, started: Callable[[], None] = _nothing, urgent: bool = False
    ) -> Completion:
        completion = await super().generate(request, started, urgent)
        self.drafts.note(completion)
        return completion
