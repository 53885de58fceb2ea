"""The service's errors, and the one place that gives each its answer over HTTP.

ClozeError
├── BadSettings               at start: a setting that cannot be used
├── SessionError              at start: a graph that cannot be run as asked
└── ServiceError              a request that gets no vectors
    ├── BadRequest            400  no HTTP/1.1
    ├── Malformed             400  the body is no JSON
    ├── Empty                 400  no text at all
    ├── Unauthorized          401  a key is needed, and none that is known was sent
    ├── ModelNotFound         404  no model of that name is served
    ├── Slow                  408  head or body did not come in time
    ├── ReloadFailed          409  a bundle cannot be served; the former ones are
    ├── BodyTooLarge          413
    ├── UnsupportedMedia      415
    ├── Invalid               422  the body is JSON, and not what the route takes
    ├── BackendFailed         424  the graph gave no usable vector
    ├── HeadersTooLarge       431
    └── Retriable                  may succeed when it is sent again; Retry-After says when
        ├── Overloaded        429  refused at the door
        ├── Unavailable       503  not ready, or stopping
        └── Late              504  not answered in the time it had

`encoding`'s TextTooLong and TextError answer 422. The body is {"error": …, "error_type": …}, spelt as
text-embeddings-inference spells it, and on OpenAI's routes {"error": {"message", "type", "param", "code"}}. There a
failed graph is 500, for a client of OpenAI's knows no 424. Anything else is a bug: 500, logged, and the client learns
nothing of it.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from encoding.errors import ClozeError, TextError, TextTooLong

__all__ = [
    "ANSWERS",
    "ERROR_TYPES",
    "OPENAI",
    "Answer",
    "BackendFailed",
    "BadRequest",
    "BadSettings",
    "BodyTooLarge",
    "Empty",
    "ErrorBody",
    "HeadersTooLarge",
    "Invalid",
    "Late",
    "Malformed",
    "ModelNotFound",
    "Overloaded",
    "ReloadFailed",
    "Retriable",
    "ServiceError",
    "SessionError",
    "Slow",
    "Unauthorized",
    "Unavailable",
    "UnsupportedMedia",
    "answer",
    "body",
    "respond",
    "too_many",
]


class BadSettings(ClozeError):
    """A setting cannot be used."""


class SessionError(ClozeError):
    """The graph cannot be run as asked."""


class ServiceError(ClozeError):
    """The request gets no vectors."""


class BadRequest(ServiceError):
    """The request is no HTTP/1.1, or not only one."""


class Malformed(ServiceError):
    """The body is no JSON."""


class Empty(ServiceError):
    """The request holds no text at all."""


class Unauthorized(ServiceError):
    """The route needs a key, and none that is known was sent."""


class ModelNotFound(ServiceError):
    """No model of that name is served."""


class Slow(ServiceError):
    """The request did not come in time."""


class ReloadFailed(ServiceError):
    """A bundle cannot be served; what was served still is."""


class BodyTooLarge(ServiceError):
    """The body is larger than the limit."""


class HeadersTooLarge(ServiceError):
    """The head of the request is larger than the limit."""


class UnsupportedMedia(ServiceError):
    """The body does not say that it is JSON."""


class Invalid(ServiceError):
    """The body is JSON, and not what the route takes."""


class BackendFailed(ServiceError):
    """The graph gave no usable vector; `position` is the guilty text's place among those given, where that is known."""

    def __init__(self, message: str, *, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class Retriable(ServiceError):
    """The same request may succeed in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(Retriable):
    """The service is full; the request was refused whole."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, retry_after)


class Unavailable(Retriable):
    """The service is not ready, or stopping."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message, retry_after)


class Late(Retriable):
    """The request was not answered in the time it had."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message, retry_after)


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: str
    error_type: str


@dataclass(frozen=True)
class Answer:
    """How one error is answered; `kind` and `code` are OpenAI's words for it."""

    status: int
    error_type: str
    kind: str = "invalid_request_error"
    code: str | None = None


ANSWERS: Final[dict[type[Exception], Answer]] = {
    BadRequest: Answer(400, "BadRequest"),
    Malformed: Answer(400, "Malformed"),
    Empty: Answer(400, "Empty"),
    Unauthorized: Answer(401, "Unauthorized", "authentication_error", "invalid_api_key"),
    ModelNotFound: Answer(404, "ModelNotFound", code="model_not_found"),
    Slow: Answer(408, "Slow", "timeout_error"),
    ReloadFailed: Answer(409, "ReloadFailed"),
    BodyTooLarge: Answer(413, "PayloadTooLarge"),
    UnsupportedMedia: Answer(415, "UnsupportedMediaType"),
    Invalid: Answer(422, "Validation"),
    RequestValidationError: Answer(422, "Validation"),
    TextTooLong: Answer(422, "Validation", code="context_length_exceeded"),
    TextError: Answer(422, "Tokenizer"),
    BackendFailed: Answer(424, "Backend", "server_error"),
    Overloaded: Answer(429, "Overloaded", "rate_limit_error", "rate_limit_exceeded"),
    HeadersTooLarge: Answer(431, "HeadersTooLarge"),
    Unavailable: Answer(503, "Unhealthy", "server_error", "service_unavailable"),
    Late: Answer(504, "Timeout", "timeout_error"),
}
ROUTING: Final = {404: "NotFound", 405: "MethodNotAllowed"}
SHAPES: Final = ("EmbedRequest", "SimilarityRequest", "Sentences", "Pairs", "Lists")  # pydantic names the one it tried
MESSAGES: Final = dict.fromkeys(("model_attributes_type", "model_type"), "should be a JSON object")
INTERNAL: Final = Answer(500, "Internal", "server_error")
ERROR_TYPES: Final = sorted({*(known.error_type for known in ANSWERS.values()), *ROUTING.values(), INTERNAL.error_type})
OPENAI: Final = re.compile(r"(/models/[^/]+)?/(v1|embeddings)\b")  # how the paths begin that OpenAI's clients ask
MODELS: Final = re.compile(r"/models(/[^/]+)?")  # they GET these as well; a POST there is native


def too_many(found: int, things: str, limit: int) -> Invalid:
    """The error of a list that is too long."""
    return Invalid(f"{found} {things} in one request; at most {limit} are allowed: split it")


def answer(error: Exception) -> Answer:
    """Find the answer of the nearest class; INTERNAL where there is none."""
    if isinstance(error, HTTPException):
        return Answer(error.status_code, ROUTING.get(error.status_code, "Http"))
    return next((ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS), INTERNAL)


def respond(request: Request, error: Exception) -> Response:
    """Make the answer, and leave its error type where the metrics find it."""
    found = answer(error)
    request.scope.setdefault("state", {})["error_type"] = found.error_type
    path = request.scope["path"]
    openai = OPENAI.match(path) is not None or (request.method == "GET" and MODELS.fullmatch(path) is not None)
    status = 500 if openai and found.status == 424 else found.status
    content = body(found, _message(request, error, found), openai=openai)
    return Response(content, status, _headers(error), "application/json")


def body(found: Answer, message: str, *, openai: bool = False) -> bytes:
    """The JSON of one error, in the native shape or OpenAI's."""
    if openai:
        return orjson.dumps({"error": {"message": message, "type": found.kind, "param": None, "code": found.code}})
    return orjson.dumps({"error": message, "error_type": found.error_type})


def _headers(error: Exception) -> dict[str, str]:
    match error:
        case HTTPException():
            return dict(error.headers or {})
        case Retriable():
            return {"retry-after": str(error.retry_after)}
        case Unauthorized():
            return {"www-authenticate": "Bearer"}
    return {}


def _message(request: Request, error: Exception, found: Answer) -> str:
    if found is INTERNAL:
        return "an error inside the service; its log says more"
    if isinstance(error, HTTPException):
        hint = "; /docs lists the routes" if request.app.openapi_url else ""
        return f"{request.method} {request.url.path[:200]}: {error.detail}{hint}"
    if isinstance(error, RequestValidationError):
        return "; ".join(_field(detail) for detail in error.errors()[:5])
    return str(error)


def _field(detail: dict[str, Any]) -> str:
    """`inputs.sentences[3]: …`; the values themselves stay out, for they are texts."""
    path = ""
    for part in detail["loc"][1:]:
        if part not in SHAPES:
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"{path.lstrip('.') or 'body'}: {MESSAGES.get(detail['type'], detail['msg'])}"
