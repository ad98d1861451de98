"""Errors of the gateway, and the forms in which the clients of OpenAI and Anthropic read errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libra_jax import protocols

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

_KINDS: Mapping[str, tuple[int, str]] = {
    "invalid": (400, ""),
    "context": (400, "context_length_exceeded"),
    # Clients retry 408, 409, 429 and 5xx. A rollout at its limit stays there, so its status is none of these.
    "limit": (403, "rollout_limit_reached"),
    "closed": (401, "session_closed"),
    "busy": (429, "too_many_requests"),
}
"""HTTP status and code of each kind of `protocols.Refused`."""


NO_THREADS = "thread_unsupported_request"
"""Code by which Anthropic's libraries learn that a server keeps no threads. They then send whole dialogues."""


class Problem(Exception):
    """A request that ends in an HTTP error.

    Attributes:
      status: HTTP status.
      message: sentence for the client.
      field: path of the wrong field, such as "messages[0].content"; empty if no field is wrong.
      code: short name of the error for programs; may be empty.
      retry_seconds: seconds after which the client may try again; None: it is told nothing.
    """

    def __init__(
        self, status: int, message: str, *, field: str = "", code: str = "", retry_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.retry_seconds = retry_seconds


def invalid(field: str, message: str) -> Problem:
    """Returns the error of a wrong field."""
    return Problem(400, f"{field}: {message}", field=field)


def of_refusal(refused: protocols.Refused) -> Problem:
    """Returns the error of a request that the session refuses."""
    status, code = _KINDS[refused.kind]
    retry = 1.0 if refused.kind == "busy" else None
    return Problem(status, str(refused), field=refused.field, code=code, retry_seconds=retry)


def in_openai_form(problem: Problem) -> dict[str, Any]:
    """Returns the body of an OpenAI error response."""
    kind = "server_error" if problem.status >= 500 else _OPENAI_TYPES.get(problem.status, "invalid_request_error")
    return {
        "error": {
            "message": problem.message,
            "type": kind,
            "param": problem.field or None,
            "code": problem.code or None,
        }
    }


def in_anthropic_form(problem: Problem) -> dict[str, Any]:
    """Returns the body of an Anthropic error response."""
    message = problem.message
    if problem.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # coding agents look for these words, and then compact
    error: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(problem.status, "api_error"), "message": message}
    if problem.code == NO_THREADS:
        error["details"] = {"error_code": problem.code}
    return {"type": "error", "error": error}
