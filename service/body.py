"""Reading a JSON body: its type, its size while it streams in, its JSON, its lists' lengths, each with its own error.

FastAPI would read a body of any size, take NaN for a number and a lone surrogate for a text, and answer 422 to
a body that is no JSON. A route of class `JSONRoute` reads first and hands FastAPI the finished value.
"""

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

from service.errors import BodyTooLarge, Malformed, UnsupportedMedia, too_many
from service.settings import Settings

__all__ = ["JSONRoute"]


PATIENCE = 4  # times the limit that a body too large is read, none of it kept


class JSONRoute(APIRoute):
    """A route whose body is JSON, at most `app.state.settings.max_body_bytes` long."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            _check_type(request.headers.get("content-type"))
            _check_encoding(request.headers.get("content-encoding", ""))
            settings: Settings = request.app.state.settings
            body = await _read(request, settings.max_body_bytes)
            value = _parse(body)
            _check_lists(value, settings)
            return await handle(_Parsed(request, body, value))

        return read_and_handle


class _Parsed(Request):
    """A request whose body has been read."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._json = value


def _check_type(content_type: str | None) -> None:
    essence = (content_type or "").partition(";")[0].strip().lower()
    if essence != "application/json" and not (essence.startswith("application/") and essence.endswith("+json")):
        found = (content_type or "not set")[:100]
        raise UnsupportedMedia(f"content-type is {found}; send 'content-type: application/json'")


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedMedia(f"content-encoding is {encoding[:100]}; send the body as it is, not compressed")


async def _read(request: Request, limit: int) -> bytes:
    """The whole body. Of one too large the rest is dropped as it comes, so that its sender reads the answer.

    A sender that is cut off while it writes sees a reset connection and no answer; past PATIENCE limits it is cut off.
    """
    declared = request.headers.get("content-length", "")
    found = f"{declared} bytes" if declared else f"more than {limit} bytes"
    too_large = BodyTooLarge(f"the body has {found}; at most {limit} are allowed: send fewer texts at a time")
    if declared.isdecimal() and int(declared) > PATIENCE * limit:
        raise too_large
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            body += part
        else:
            body.clear()
        if size > PATIENCE * limit:
            break
    if size > limit:
        raise too_large
    return bytes(body)


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"the body is no JSON in UTF-8: {error}") from error


def _check_lists(body: Any, settings: Settings) -> None:
    """Refuse a list beyond every route's limit before its items are looked at: the event loop waits for that."""
    for found in _lists(body):
        ids = bool(found) and isinstance(found[0], int)
        limit, things = (settings.max_text_characters, "token ids") if ids else (settings.max_inputs, "texts")
        if len(found) > limit:
            raise too_many(len(found), things, limit)


def _lists(body: Any) -> Iterator[list[Any]]:
    """The lists among the fields, and among those of `inputs`; others lie in these."""
    for fields in (body, body.get("inputs")) if isinstance(body, dict) else ():
        if isinstance(fields, dict):
            yield from (value for value in fields.values() if isinstance(value, list))
