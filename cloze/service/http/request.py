"""What every route needs from a request: its context, the model, the JSON body, its texts and token ids.

FastAPI would accept NaN as a number and a lone surrogate as text, and would answer 422 to a body that is not JSON, so a
route of class `JSONRoute` parses the body itself. Bodies can hold millions of items and are checked on the event loop,
so each list is checked in one pass that stops at its first error.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, get_type_hints

import orjson
from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError
from starlette.types import Scope

from cloze.service.errors import EmptyInput, InvalidJSON, OtherSpace, UnsupportedMediaType, ValidationFailed, too_many
from cloze.service.inference.model import MAX_TEXT_CHARACTERS, Model
from cloze.service.inference.model import Inputs as EmbedderInputs
from cloze.service.monitoring.logs import RequestRecord, current_request
from cloze.service.routes import COHERE, DECODE, MODEL_ROUTES
from cloze.service.services import Services

SPACE_HEADER: Final = "x-embedding-space"
LISTS: Final = frozenset({"accept", "connection", "if-match", SPACE_HEADER})
SWITCH: Final = (
    "If they are not this model's own, send texts; LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)"
)
VALUES: Final = 4  # commas and brackets for each text, at most: a pair of texts has three
COHERE_VALUES: Final = 8  # an input of Cohere's has five, and three more for each further part of it
FIELDS: Final = 1000  # commas and brackets for everything else
SMALL: Final = 65_536  # bytes of a body that is parsed in a millisecond, whatever it contains
LARGE: Final = 1_048_576  # bytes above which a body is checked in a worker thread
MAX_DECODE_IDS: Final = 2**18  # of one request: a body of eight million would occupy a worker for seconds
FOREIGN: Final = (
    "token ids are not accepted, since those of another model look the same and would give wrong vectors without an "
    f"error. {SWITCH}. If they are, start the service with --token-ids"
)


@dataclass(frozen=True)
class RequestContext:
    """The services, the request's record, the model that its path names, and what its client accepts."""

    services: Services
    record: RequestRecord
    model: str | None
    spaces: tuple[frozenset[str], ...]  # sets of vector spaces: each must contain the model's
    accept: str = ""  # the header


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the first value of each header of a request, and all values of LISTS. They are parsed only once."""
    headers: dict[str, str] | None = scope.get("cloze.headers")
    if headers is None:
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(reversed(pairs))
        if len(headers) < len(pairs):  # a list may be sent as several lines (RFC 9110, section 5.3)
            for listed in headers.keys() & LISTS:
                headers[listed] = ", ".join(value for name, value in pairs if name == listed)
        scope["cloze.headers"] = headers
    return headers


def _record() -> RequestRecord:
    record = current_request.get()
    assert record is not None, "a route runs inside RequestMiddleware. This is a bug."
    return record


async def _context(request: Request) -> RequestContext:
    record = _record()
    headers = headers_of(request.scope)
    spaces = _spaces(headers) if request.scope["path"] in MODEL_ROUTES else ()  # others return no vectors
    model, accept = request.scope["cloze.model"], headers.get("accept", "")
    return RequestContext(request.app.state.services, record, model, spaces, accept)


def _spaces(headers: Mapping[str, str]) -> tuple[frozenset[str], ...]:
    """Read If-Match, where "*" means any (RFC 9110, 13.1.1), and x-embedding-space."""
    lists = (headers.get(name, "").split(",") for name in ("if-match", SPACE_HEADER))
    tags = (frozenset(tag.strip().removeprefix("W/").strip('"') for tag in each) - {""} for each in lists)
    return tuple(spaces for spaces in tags if spaces and "*" not in spaces)


Context = Annotated[RequestContext, Depends(_context)]


def lease(context: RequestContext, *names: str | None) -> Model:
    """Return the model that the path or the body names, or the default, to be used within a `with` block.

    Raises ModelNotFound, ValidationFailed if two models are named, and OtherSpace if the client expects another vector
    space.
    """
    model, template = context.services.models.find(context.model, *names)
    context.record.model, context.record.template = model.name, template
    if others := [spaces for spaces in context.spaces if model.space not in spaces]:
        raise OtherSpace(
            f"model {model.name} has the vector space {model.space}, but the request expects "
            f"{', '.join(sorted(others[0])):.200}; the vectors of two spaces cannot be compared: embed the "
            "stored texts again, or serve the model that they were embedded with",
            model.space,
        )
    return model


def named_template(context: RequestContext, model: Model, name: str | None) -> str | None:
    """Return the name of the template that a request chooses, by `name` or by an alias of the model.

    Raises ValidationFailed if the model has no such template.
    """
    if name is None:
        return context.record.template
    if name in model.bundle.named:
        return name
    names = ", ".join(model.bundle.named) or "none"
    message = f"prompt_name is {name!r:.200}; the named templates of model {model.name} are: {names}"
    raise ValidationFailed(message, "prompt_name")


def as_list(inputs: str | list[str] | list[int] | list[list[int]], *, token_ids: bool) -> EmbedderInputs:
    """Return one input as a list of one. Raises EmptyInput, and ValidationFailed for token ids that are not allowed."""
    if isinstance(inputs, str):
        return [inputs]
    if not inputs:
        raise EmptyInput("the input is an empty list; send at least one text")
    if isinstance(inputs[0], str):
        return inputs
    if not token_ids:
        raise ValidationFailed(FOREIGN, "input")
    return [inputs] if isinstance(inputs[0], int) else inputs


class JSONRoute(APIRoute):
    """A route whose body is JSON, and whose endpoint takes `body` and `context`.

    `serve` does all the work: FastAPI only documents the route, and the middleware calls `serve` directly.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._body = TypeAdapter[Any](get_type_hints(endpoint, include_extras=True)["body"])
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.serve

    async def serve(self, request: Request) -> Response:
        """Answer a request. Raises ClozeError, and RequestValidationError for a body that the route does not accept."""
        headers = headers_of(request.scope)
        _check_headers(headers.get("content-type"), headers.get("content-encoding", ""))
        content = b"".join([part async for part in request.stream()])
        await self._check_values(content, request.app.state.services)
        body = self._parse(content, request.app.state.services.settings.max_client_batch_size)
        del content
        response: Response = await self.endpoint(body, await _context(request))
        return response

    async def _check_values(self, content: bytes, services: Services) -> None:
        """Refuse more values than any request needs: parsing millions of them would block the event loop."""
        settings = services.settings
        if len(content) <= SMALL:
            return
        values = COHERE_VALUES if self.path == COHERE.path else VALUES
        limit = values * settings.max_client_batch_size + FIELDS + (MAX_DECODE_IDS if self.path == DECODE.path else 0)
        marks = b"[{" if settings.token_ids else b"[{,"  # lists of token ids have as many commas as ids
        if len(content) <= LARGE:
            count = _values(content, limit, marks)
        else:
            count = await services.executors.workers.run(_record().client, partial(_values, content, limit, marks))
        if count > limit:
            raise ValidationFailed(f"the body has more than {limit} values; send fewer texts at a time", "input")

    def _parse(self, content: bytes, max_texts: int) -> Any:
        """Return the body as the endpoint takes it. Fields that it does not take are dropped."""
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise InvalidJSON(f"the body is not JSON in UTF-8: {error}") from error
        _check_lists(value, max_texts)
        try:
            return self._body.validate_python(value)
        except ValidationError as error:
            errors = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors(include_url=False)]
            raise RequestValidationError(errors) from None


def _values(content: bytes, limit: int, marks: bytes) -> int:
    """Count these JSON marks outside strings. Brackets and commas are at least as many as the values, minus one.

    After `limit` strings, everything counts as outside.
    """
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts = content.split(b'"', 2 * limit)  # alternately outside and inside strings; the last part is the rest
    return sum(part.count(mark) for part in parts[::2] for mark in marks)


def _check_headers(content_type: str | None, encoding: str) -> None:
    essence = (content_type or "").partition(";")[0].strip().lower()
    if essence != "application/json" and not (essence.startswith("application/") and essence.endswith("+json")):
        received = (content_type or "not set")[:100]
        raise UnsupportedMediaType(f"content-type is {received}; send 'content-type: application/json'")
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType(f"content-encoding is {encoding[:100]}; send the body without compression")


def _check_lists(body: Any, max_texts: int) -> None:
    """Refuse a list beyond every route's limit before its items are checked, which would block the event loop.

    A list is a field of the body or of its `inputs`; other lists are inside these.
    """
    for fields in (body, body.get("inputs")) if isinstance(body, dict) else ():
        for value in fields.values() if isinstance(fields, dict) else ():
            if isinstance(value, list):
                ids = bool(value) and isinstance(value[0], int)
                limit, unit = (MAX_TEXT_CHARACTERS, "token ids") if ids else (max_texts, "texts")
                if len(value) > limit:
                    raise too_many(len(value), unit, limit)


def one_of(kinds: str, item: Any = "") -> Discriminator:
    """Choose by the first item, so that an error names the first item of another kind; `item` is for an empty list."""

    def choose(value: Any) -> str | None:
        if not isinstance(value, list):
            return "str" if isinstance(value, str) else None
        first = value[0] if value else item
        return "list[int]" if isinstance(first, int) else "list[list]" if isinstance(first, list) else "list[str]"

    return Discriminator(choose, custom_error_type="kind", custom_error_message=f"should be {kinds}")


TextList = Annotated[list[str], Field(fail_fast=True)]
IdList = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]  # the encoder checks the vocabulary
Text = Annotated[str, Tag("str")]
Texts = Annotated[TextList, Tag("list[str]")]
Ids = Annotated[IdList, Tag("list[int]")]
IdLists = Annotated[list[IdList], Field(fail_fast=True), Tag("list[list]")]
Inputs = Annotated[Text | Texts | Ids | IdLists, one_of("a text or a list of texts (or of token ids)")]
TextOrTexts = Annotated[Text | Texts, one_of("a text or a list of texts")]
AnyIds = Annotated[Ids | IdLists, one_of("a list of token ids, or a list of such lists", item=0)]
