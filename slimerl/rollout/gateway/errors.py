"""What a client is told when a request fails, in the shape that OpenAI clients read.

Invariant: every failure has a status, a type, and a name under which it is counted; the message says what to do.
"""

from typing import Any

from slimerl.rollout.dispatch import GenerationFailed
from slimerl.rollout.gateway.conversation import ConversationError
from slimerl.rollout.gateway.sessions import SessionError
from slimerl.rollout.gateway.template import TemplateError

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_OF_SESSIONS = {"too_many_sessions": 429, "too_many_turns": 400}


class ApiError(Exception):
    """`name`: for counting, also the error's `code`."""

    def __init__(self, status: int, name: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.name = name
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.name}}


def refused(message: str, param: str | None = None, name: str = "invalid_value") -> ApiError:
    return ApiError(400, name, message, param)


def unforeseen(error: Exception) -> ApiError:
    """What an error is to a client that nobody thought of; whoever makes it logs it."""
    return ApiError(500, "internal_error", f"{type(error).__name__}: see the log of the rollout role")


def api_error(error: Exception) -> ApiError | None:
    """What a foreseen error is to a client; None: it was not foreseen."""
    match error:
        case ApiError():
            return error
        case ConversationError():
            return refused(str(error), error.param, "invalid_messages")
        case TemplateError():
            return refused(str(error), "messages", "template_refused")
        case SessionError(reason=reason):
            return ApiError(_OF_SESSIONS.get(reason, 400), reason, str(error))
        case GenerationFailed(reason="refused"):
            return refused(f"the engine refused the request: {error}", None, "generation_refused")
        case GenerationFailed(reason=reason):
            return ApiError(503, f"generation_{reason}", f"no engine generated this; ask again: {error}")
    return None
