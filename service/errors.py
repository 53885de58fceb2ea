"""The service's errors, and the one place that gives each its answer over HTTP.

ClozeError
├── BadSettings               at start: a setting that cannot be used
├── SessionError              at start: a graph that cannot be run as asked
└── ServiceError              a request that gets no vectors
    ├── Malformed             400  the body is no JSON
    ├── Empty                 400  no text at all
    ├── BodyTooLarge          413
    ├── UnsupportedMedia      415
    ├── Invalid               422  the body is JSON, and not what the route takes
    ├── BackendFailed         424  the graph gave no usable vector
    ├── Overloaded            429  refused at the door; Retry-After says when to come again
    └── Unavailable           503  not ready, or stopping

`encoding`'s TextTooLong and TextError answer 422. The body is {"error": …, "error_type": …}, spelt as
text-embeddings-inference spells it. Anything else is a bug: 500, logged, and the client learns nothing of it.
"""

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
    "INTERNAL",
    "Answer",
    "BackendFailed",
    "BadSettings",
    "BodyTooLarge",
    "Empty",
    "ErrorBody",
    "Invalid",
    "Malformed",
    "Overloaded",
    "ServiceError",
    "SessionError",
    "Unavailable",
    "UnsupportedMedia",
    "answer",
    "respond",
]


class BadSettings(ClozeError):
    """A setting cannot be used."""


class SessionError(ClozeError):
    """The graph cannot be run as asked."""


class ServiceError(ClozeError):
    """The request gets no vectors."""


class Malformed(ServiceError):
    """The body is no JSON."""


class Empty(ServiceError):
    """The request holds no text at all."""


class BodyTooLarge(ServiceError):
    """The body is larger than the limit."""


class UnsupportedMedia(ServiceError):
    """The body does not say that it is JSON."""


class Invalid(ServiceError):
    """The body is JSON, and not what the route takes."""


class BackendFailed(ServiceError):
    """The graph gave no usable vector."""


class Overloaded(ServiceError):
    """The service is full; the request was refused whole."""


class Unavailable(ServiceError):
    """The service is not ready, or stopping."""


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: str
    error_type: str


@dataclass(frozen=True)
class Answer:
    """How one error is answered."""

    status: int
    error_type: str
    headers: tuple[tuple[str, str], ...] = ()


ANSWERS: Final[dict[type[Exception], Answer]] = {
    Malformed: Answer(400, "Malformed"),
    Empty: Answer(400, "Empty"),
    BodyTooLarge: Answer(413, "PayloadTooLarge"),
    UnsupportedMedia: Answer(415, "UnsupportedMediaType"),
    Invalid: Answer(422, "Validation"),
    RequestValidationError: Answer(422, "Validation"),
    TextTooLong: Answer(422, "Validation"),
    TextError: Answer(422, "Tokenizer"),
    BackendFailed: Answer(424, "Backend"),
    Overloaded: Answer(429, "Overloaded", (("retry-after", "1"),)),
    Unavailable: Answer(503, "Unhealthy", (("retry-after", "5"),)),
}
ROUTING: Final = {404: "NotFound", 405: "MethodNotAllowed"}
SHAPES: Final = ("embed", "similarity")  # the two bodies that POST / takes; pydantic names the one it tried
MESSAGES: Final = dict.fromkeys(("model_attributes_type", "model_type"), "should be a JSON object")
INTERNAL: Final = Answer(500, "Internal")
ERROR_TYPES: Final = sorted({*(known.error_type for known in ANSWERS.values()), *ROUTING.values(), INTERNAL.error_type})


def answer(error: Exception) -> Answer:
    """Find the answer of the nearest class; INTERNAL where there is none."""
    if isinstance(error, HTTPException):
        headers = tuple((error.headers or {}).items())
        return Answer(error.status_code, ROUTING.get(error.status_code, "Http"), headers)
    return next((ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS), INTERNAL)


def respond(request: Request, error: Exception) -> Response:
    """Make the answer, and leave its error type where the metrics find it."""
    found = answer(error)
    request.scope.setdefault("state", {})["error_type"] = found.error_type
    body = orjson.dumps({"error": _message(request, error, found), "error_type": found.error_type})
    return Response(body, found.status, dict(found.headers), "application/json")


def _message(request: Request, error: Exception, found: Answer) -> str:
    if found is INTERNAL:
        return "an error inside the service; its log says more"
    if isinstance(error, HTTPException):
        return f"{request.method} {request.url.path}: {error.detail}; /docs lists the routes"
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
