"""Errors as HTTP responses: the body in the shape that the route's clients expect, and its OpenAPI description."""

from http import HTTPStatus
from typing import Any, Final

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cloze.encoding.errors import TextError
from cloze.service.errors import (
    ERROR_RESPONSES,
    INTERNAL,
    INVALID,
    OTHER_STATUS,
    ROUTING,
    BackendFailed,
    EmptyInput,
    ErrorResponse,
    ModelNotFound,
)
from cloze.service.monitoring.logs import current_request
from cloze.service.routes import Shape, meant, shape_of

TAGS: Final = (  # parts of an error's location that only name the union member that pydantic tried
    *("EmbedRequest", "SimilarityRequest", "Sentences", "Pairs", "Lists"),
    *("str", "list[str]", "list[int]", "list[list]"),
)
MESSAGES: Final = dict.fromkeys(("model_attributes_type", "model_type"), "should be a JSON object")


class ErrorBody(BaseModel):
    """An error of the native routes."""

    error: str
    error_type: str


class OpenAIError(BaseModel):
    """The fields that OpenAI's clients read from an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(BaseModel):
    """An error of OpenAI's routes."""

    error: OpenAIError


class CohereErrorBody(BaseModel):
    """An error of Cohere's route."""

    message: str


BODIES: Final[dict[Shape, type[BaseModel]]] = {
    "native": ErrorBody,
    "openai": OpenAIErrorBody,
    "cohere": CohereErrorBody,
}


def documented(*statuses: int, shape: Shape = "native") -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses for these statuses, by default for all that a request with texts can get."""
    descriptions = {
        entry.status: entry.description for entry in ERROR_RESPONSES.values() if entry.status != 409 or 409 in statuses
    }
    if shape != "native":  # its clients do not know 424
        descriptions[500] = descriptions.pop(424)
    if shape == "openai":  # its clients raise BadRequestError at 400
        descriptions[400] += f"; {INVALID.description[0].lower()}{INVALID.description[1:]}"
        del descriptions[422]
    answers: dict[int | str, dict[str, Any]] = {
        status: {"model": BODIES[shape], "description": descriptions[status]}
        for status in sorted(statuses or descriptions)
    }
    if shape == "openai":  # FastAPI would add a 422 of its own
        answers["default"] = {"model": BODIES[shape], "description": "Another error"}
    return answers


def error_response(error: Exception) -> ErrorResponse:
    """Find the response for the error's nearest class; INTERNAL if there is none."""
    if isinstance(error, HTTPException):
        return ErrorResponse(error.status_code, ROUTING.get(error.status_code, OTHER_STATUS), error.detail)
    if isinstance(error, RequestValidationError):
        return INVALID
    return next(
        (ERROR_RESPONSES[error_class] for error_class in type(error).__mro__ if error_class in ERROR_RESPONSES),
        INTERNAL,
    )


async def handle_error(request: Request, error: Exception) -> Response:
    """Respond to an error in the shape of the router that serves the path, and record its type."""
    record = current_request.get()
    assert record is not None, "errors are handled inside RequestMiddleware. This is a bug."
    record.error_type = error_response(error).error_type
    where, docs = f"{request.method} {record.path[:200]}", bool(request.app.openapi_url)
    return response_to(error, shape=shape_of(request.scope["path"]), where=where, docs=docs)


def response_to(error: Exception, *, shape: Shape, where: str = "", docs: bool = False) -> Response:
    """Make the response, in the shape of the route's clients. `where` is the requested method and path."""
    known = error_response(error)
    status = 500 if shape != "native" and isinstance(error, BackendFailed) else known.status
    if shape == "openai" and status == INVALID.status:
        status = 400
    message = _message(error, known, where, docs)
    content: Any = {"error": message, "error_type": known.error_type}
    if shape == "openai":
        named = {"param": _param(error), "code": known.openai_code}
        content = {"error": {"message": message, "type": known.openai_type, **named}}
    if shape == "cohere":
        content = {"message": message}
    return Response(orjson.dumps(content), status, getattr(error, "headers", None), "application/json")


def _param(error: Exception) -> str | None:
    """Return the wrong field of OpenAI's request, if it is known."""
    if isinstance(error, RequestValidationError):
        return next((str(detail["loc"][1]) for detail in error.errors() if len(detail["loc"]) > 1), None)
    if isinstance(error, TextError | EmptyInput):
        return "input"
    return "model" if isinstance(error, ModelNotFound) else getattr(error, "field", None)


def _message(error: Exception, known: ErrorResponse, where: str, docs: bool) -> str:
    if known is INTERNAL:
        return "an error inside the service; see its log"
    if isinstance(error, HTTPException):
        detail = error.detail or HTTPStatus(error.status_code).phrase
        path = meant(where.partition(" ")[2])
        advice = f"; ask for {path}" if path else "; /docs lists the routes" if docs else ""
        return f"{where}: {detail}{advice}"
    if isinstance(error, RequestValidationError):
        return "; ".join(_field(detail) for detail in error.errors()[:5])
    return str(error)


def _field(detail: dict[str, Any]) -> str:
    """Name the field, as in `inputs.sentences[3]: …`; values are omitted, because they are texts."""
    path = ""
    for part in detail["loc"][1:]:
        if part not in TAGS:
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"{path.lstrip('.') or 'body'}: {MESSAGES.get(detail['type'], detail['msg'])}"
