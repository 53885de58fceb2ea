"""The service's errors, and the one table of their HTTP statuses and of their names in responses.

ClozeError
├── SessionError              a graph that cannot be run as asked, or that fails on every text of a bulk job
└── ServiceError              a request that failed; ERROR_RESPONSES has the status of each
    ├── InvalidJSON, EmptyInput, Unauthorized, ModelNotFound, RequestTimeout, ReloadFailed, OtherSpace, BodyTooLarge,
    │   UnsupportedMediaType, ValidationFailed, BackendFailed
    └── Retriable             may succeed when it is sent again after `retry_after` seconds
        └── Overloaded, Unavailable, DeadlineExceeded

The error types on the wire are those of text-embeddings-inference, if it has one. Any other exception is a bug: it is
logged and answered with a bare 500.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cloze.encoding.errors import ClozeError, TextError, TextTooLong

CHALLENGE: Final = {"www-authenticate": "Bearer"}
NOT_READ: Final = {"connection": "close"}  # the rest of the body is not read

FORKED: Final = (
    "this process was forked from one that had loaded the model, and threads do not survive a fork; load the model in "
    "this process"
)


class SessionError(ClozeError):
    """The graph cannot be run as asked."""


class ServiceError(ClozeError):
    """The request failed. `headers` are those of the response."""

    headers: Mapping[str, str] = {}


class InvalidJSON(ServiceError):
    """The body is not JSON in UTF-8."""


class EmptyInput(ServiceError):
    """The request holds no text."""


class Unauthorized(ServiceError):
    """The route needs a key, and no known key was sent."""

    headers = CHALLENGE


class ModelNotFound(ServiceError):
    """No model of that name is served."""


class OtherSpace(ServiceError):
    """The client expects vectors of another space than the model's."""

    def __init__(self, message: str, space: str) -> None:
        super().__init__(message)
        self.headers = {"x-embedding-space": space}


class RequestTimeout(ServiceError):
    """The body did not arrive in time."""

    headers = NOT_READ


class ReloadFailed(ServiceError):
    """A bundle cannot be served; the previous models are still served."""


class BodyTooLarge(ServiceError):
    """The body is larger than the limit."""

    headers = NOT_READ


class UnsupportedMediaType(ServiceError):
    """The request does not declare a JSON body."""


class ValidationFailed(ServiceError):
    """The body is JSON, but not what the route accepts. `field` is the wrong field, if it is known."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BackendFailed(TextError, ServiceError):
    """The graph gave no usable vector; `position` is the index of the input that failed, if it is known."""


class Retriable(ServiceError):
    """The same request may succeed in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.headers = {"retry-after": str(retry_after)}


class Overloaded(Retriable):
    """The service is full; the complete request was refused."""


class Unavailable(Retriable):
    """The service is not ready, or is stopping."""


class DeadlineExceeded(Retriable):
    """The request was not answered in the time it had."""


@dataclass(frozen=True)
class ErrorResponse:
    """The response to one error. `openai_type` and `openai_code` are OpenAI's names for it."""

    status: int
    error_type: str
    description: str
    openai_type: str = "invalid_request_error"
    openai_code: str | None = None


INVALID: Final = ErrorResponse(422, "Validation", "A field is wrong, a text is too long, or there are too many texts")
ERROR_RESPONSES: Final[dict[type[Exception], ErrorResponse]] = {
    InvalidJSON: ErrorResponse(400, "Malformed", "The body is not JSON, or has no text in it"),
    EmptyInput: ErrorResponse(400, "Empty", "The body is not JSON, or has no text in it"),
    Unauthorized: ErrorResponse(
        401, "Unauthorized", "A known key is needed", "authentication_error", "invalid_api_key"
    ),
    ModelNotFound: ErrorResponse(
        404, "ModelNotFound", "No model of that name is served", openai_code="model_not_found"
    ),
    RequestTimeout: ErrorResponse(408, "Slow", "The body did not arrive in time", "timeout_error"),
    ReloadFailed: ErrorResponse(409, "ReloadFailed", "A bundle cannot be served; nothing has changed"),
    OtherSpace: ErrorResponse(412, "OtherSpace", "The model has another vector space than If-Match expects"),
    BodyTooLarge: ErrorResponse(413, "PayloadTooLarge", "The body is larger than the limit"),
    UnsupportedMediaType: ErrorResponse(415, "UnsupportedMediaType", "The content type is not JSON"),
    ValidationFailed: INVALID,
    TextTooLong: ErrorResponse(422, "Validation", INVALID.description, openai_code="context_length_exceeded"),
    TextError: ErrorResponse(422, "Tokenizer", INVALID.description),
    BackendFailed: ErrorResponse(424, "Backend", "The model failed on this input", "server_error"),
    Overloaded: ErrorResponse(
        429, "Overloaded", "The service is full; see Retry-After", "rate_limit_error", "rate_limit_exceeded"
    ),
    Unavailable: ErrorResponse(503, "Unhealthy", "The service is not ready", "server_error", "service_unavailable"),
    DeadlineExceeded: ErrorResponse(504, "Timeout", "The request was not answered in the time it had", "timeout_error"),
}
INTERNAL: Final = ErrorResponse(500, "Internal", "A bug in the service", "server_error")
ROUTING: Final = {404: "NotFound", 405: "MethodNotAllowed"}  # Starlette's own errors
OTHER_STATUS: Final = "Http"
ERROR_TYPES: Final = sorted(
    {INTERNAL.error_type, OTHER_STATUS, *ROUTING.values(), *(known.error_type for known in ERROR_RESPONSES.values())}
)
STATUSES: Final = sorted({200, *ROUTING, INTERNAL.status, *(known.status for known in ERROR_RESPONSES.values())})


def too_many(count: int, unit: str, limit: int) -> ValidationFailed:
    """Make the error for a list that is too long."""
    return ValidationFailed(f"{count} {unit} in one request; at most {limit} are allowed: split it", "input")
