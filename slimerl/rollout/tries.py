"""What one try at an engine came to: tokens that may be passed on, or a failure with a name. Pure."""

from slimerl.engine.protocol import Generation, SamplingParams


class TryFailed(Exception):
    """One try came to nothing. `again`: another one may succeed. `suspect`: the engine may be at fault."""

    def __init__(self, reason: str, detail: str, again: bool, suspect: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        self.again = again
        self.suspect = suspect


def check_answer(generation: Generation, versions: range, params: SamplingParams, held: bool) -> None:
    """`versions`: that engines served since it was sent; `held`: new weights are on their way."""
    if generation.finish_reason == "abort" and not (held or len(versions) > 1):
        raise TryFailed("aborted", "the engine aborted the request", again=True, suspect=False)
    if not generation.tokens and params.max_new_tokens and generation.finish_reason != "abort":
        raise TryFailed("empty", "the engine generated no token", again=False, suspect=False)
    if len(generation.tokens) > params.max_new_tokens:
        detail = f"{len(generation.tokens)} tokens where {params.max_new_tokens} were asked for"
        raise TryFailed("bad_answer", detail, again=False, suspect=False)
    check_versions(generation, versions)


def check_versions(generation: Generation, versions: range) -> None:
    wrong = set(generation.versions) - set(versions)
    if wrong or generation.versions != sorted(generation.versions):
        served = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else f"{versions[0]}"
        found = sorted(wrong) or f"in the order {generation.versions}"
        detail = f"it generated with weights of version {found} where {served} is required"
        raise TryFailed("wrong_version", detail, again=True, suspect=False)
