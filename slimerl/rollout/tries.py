"""What one try at an engine came to: tokens that may be passed on, or a failure with a name. Pure."""

from slimerl.engine.client import EngineError, EngineRefused, EngineTimeout, EngineUnreachable
from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.engine.routed_experts import RoutedExpertsError


class TryFailed(Exception):
    """One try came to nothing. `again`: another one may succeed. `suspect`: the engine may be at fault."""

    def __init__(self, reason: str, detail: str, again: bool, suspect: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        self.again = again
        self.suspect = suspect


def as_failure(error: EngineError | RoutedExpertsError) -> TryFailed:
    """What an engine's error says of the try."""
    if isinstance(error, EngineTimeout):
        return TryFailed("timeout", str(error), again=True, suspect=True)
    if isinstance(error, EngineUnreachable):
        return TryFailed("unreachable", str(error), again=True, suspect=True)
    if isinstance(error, EngineRefused):
        # 4xx: the request itself is at fault, and another engine would say the same.
        again = error.status >= 500 or error.status in (408, 429)
        return TryFailed("engine_error" if again else "refused", str(error), again, suspect=again)
    return _bad_answer(str(error))


def _bad_answer(detail: str) -> TryFailed:
    """Draws are keyed: an engine that answers well gives the tokens that this one would have given."""
    return TryFailed("bad_answer", detail, again=True, suspect=True)


def check_answer(generation: Generation, versions: range, params: SamplingParams, held: bool) -> None:
    """`versions`: that engines served since it was sent; `held`: new weights are on their way."""
    if generation.finish_reason == "abort" and not (held or len(versions) > 1):
        raise TryFailed("aborted", "the engine aborted the request", again=True, suspect=False)
    if not generation.tokens and params.max_new_tokens and generation.finish_reason != "abort":
        raise TryFailed("empty", "the engine generated no token", again=False, suspect=False)
    if len(generation.tokens) > params.max_new_tokens:
        detail = f"{len(generation.tokens)} tokens where {params.max_new_tokens} were asked for"
        raise _bad_answer(detail)
    check_versions(generation, versions)


def check_versions(generation: Generation, versions: range) -> None:
    given = generation.versions
    if given and given[0] in versions and given.count(given[0]) == len(given):
        return  # as nearly always
    wrong = set(given) - set(versions)
    if wrong or given != sorted(given):
        served = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else f"{versions[0]}"
        found = sorted(wrong) or f"in the order {given}"
        detail = f"it generated with weights of version {found} where {served} is required"
        raise TryFailed("wrong_version", detail, again=True, suspect=False)


def newest_version(generation: Generation) -> int:
    """-1: it has no token. An answer whose versions go back is refused above."""
    return generation.versions[-1] if generation.versions else -1
