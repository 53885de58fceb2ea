"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on what a client may send and how long it may take.

    uvicorn.Config(app, http=protocol(settings, count), …)

- `max_header_bytes`: of the request line and headers, and of any other run of bytes that is no body: 431.
- `header_seconds`: from the connection, or the next request's first byte, to the end of its headers: 408. Where not a
  byte of a request has come, the connection is closed without an answer.
- `body_seconds`: from the end of the headers to the end of the body: 408; the application sees a client that left, and
  why in its scope's state, `error_type`.
- `send_seconds`: time in which a client must have taken its answer, or 64 KiB more of it: else it is cut off.
- What is no HTTP/1.1, or could be read in two ways: 400.

Time that the service itself takes counts against none of them. Each of these answers is JSON, of the shape of the
service's other errors, comes after the answers to all earlier requests, and closes the connection. Each is logged, and
`count` is called with Slow, HeadersTooLarge or BadRequest for it; and with Slow for one that was cut off. A request to
change the protocol (`upgrade: h2c`) is served as if it had not asked; uvicorn would lose its body.

Time between requests stays uvicorn's `timeout_keep_alive`.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

import httptools
from starlette.datastructures import Headers
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service import errors
from service.auth import peer
from service.errors import ANSWERS, Answer, BadRequest, HeadersTooLarge, ServiceError, Slow, answer
from service.logs import accept_id, request_id, shown
from service.settings import Settings

__all__ = ["Protocol", "protocol"]

logger = logging.getLogger(__name__)

LINGER: Final = 2.0  # seconds that a refused client has to read why, before what it still sends resets the connection
PROGRESS: Final = 65_536  # bytes


def protocol(settings: Settings, count: Callable[[str], None]) -> type[HttpToolsProtocol]:
    """Bind the limits; `count` is told the error type of each request refused here."""

    class Limited(Protocol):
        def __init__(self, **options: Any) -> None:
            super().__init__(settings, count, **options)

    return Limited


class Protocol(HttpToolsProtocol):
    """One connection. Reading and writing each have one timer, and neither outlives the connection."""

    def __init__(self, settings: Settings, count: Callable[[str], None], **options: Any) -> None:
        super().__init__(**options)
        self.settings = settings
        self.count = count
        self.url = b""
        self.headers = []
        self._running: RequestResponseCycle | None = None  # uvicorn's `cycle` is the request that came last
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._begun = False  # a request's first byte has come, and its headers have not ended
        self._in_body = False
        self._seen = 0  # bytes since the last request, headers or part of a body ended
        self._refused: bytes | None = None  # the last answer, sent or waiting for those before it

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_input(self.settings.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_nothing()
        if self._writing is not None:
            self._writing.cancel()
        self._unset_keepalive_if_required()  # uvicorn leaves it after a reset
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return  # whatever it is, the connection ends
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except ServiceError as error:
            self._refuse(error)
        except httptools.HttpParserCallbackError as error:
            found = error.__context__
            self._refuse(found if isinstance(found, ServiceError) else BadRequest("the request's URL is not valid"))
        except httptools.HttpParserError as error:
            self._refuse(BadRequest(f"the request is no HTTP/1.1: {error}"))
        else:
            if self._reading is None and (self._begun or self._seen):
                self._await_input(self.settings.header_seconds)

    def _parse(self, data: memoryview) -> None:
        """Feed the parser no more at a time than may still come without an end of headers or a piece of body."""
        limit = self.settings.max_header_bytes
        while data:
            part = data[: limit - self._seen]
            self._seen += len(part)
            data = data[self._feed(part) :]
            if self._seen >= limit:
                raise HeadersTooLarge(f"the request's head is longer than {limit} bytes, the limit; send less in it")

    def _feed(self, part: memoryview) -> int:
        """How many bytes were read: all, or those before what would be in another protocol."""
        try:
            self.parser.feed_data(part)
            return len(part)
        except httptools.HttpParserUpgrade as upgrade:
            read: int = upgrade.args[0]
        self._decline_upgrade()
        return read

    def _decline_upgrade(self) -> None:
        """Parse the headers once more without the wish to change the protocol; then the body is the request's own."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise BadRequest("CONNECT is not served")
        close = any(name == b"connection" and b"close" in value.lower() for name, value in self.headers)
        kept = [(name, value) for name, value in self.headers if name not in (b"connection", b"upgrade")]
        kept += [(b"connection", b"close")] if close else []
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in kept]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    # What the parser finds

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # a trailer is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        _check(self.headers, self.parser.get_http_version())
        super().on_headers_complete()
        self._begun, self._in_body, self._seen = False, True, 0
        self._await_input(self.settings.body_seconds)

    def on_body(self, body: bytes) -> None:
        self._seen = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._begun, self._in_body, self._seen = False, False, 0
        self.url, self.headers = b"", []  # of the next one nothing is known
        self._await_nothing()

    # Reading in time

    def _await_input(self, seconds: float) -> None:
        self._await_nothing()
        self._reading = self.loop.call_later(seconds, self._input_is_late, seconds)

    def _await_nothing(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _input_is_late(self, seconds: float) -> None:
        self._reading = None
        if self._is_our_turn():
            self._await_input(seconds)
        elif self._in_body:
            self._refuse(Slow(f"the request's body did not come within {seconds:g} seconds, the limit"))
        elif self._begun:
            self._refuse(Slow(f"the request's head did not come within {seconds:g} seconds, the limit"))
        else:
            self.transport.close()

    def _is_our_turn(self) -> bool:
        """Whether the client is right to wait: for an earlier answer, for 100 Continue, or for us to read on."""
        if not self._in_body:
            return self._is_answering()
        return bool(self.pipeline) or self.flow.read_paused or self.cycle.waiting_for_100_continue

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # Running

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """A request whose drain is over ends here where its answer has begun; uvicorn would ask for the rest of it."""
        self._running = cycle

        async def served(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                if not cycle.response_started:
                    raise
                cycle.disconnected = True
                self.transport.close()

        super()._start_asgi_task(cycle, served)

    # Refusing

    def _refuse(self, error: ServiceError) -> None:
        """Answer the request that is being read, after those before it; then close."""
        found, identity = answer(error), self._identity()
        self._await_nothing()
        self._refused = self._last_answer(found, str(error), identity)
        if not self._in_body or self.pipeline or not self.cycle.response_started:  # else it has another answer
            self._tell(found, identity)
        if self._in_body and self.pipeline:
            self.pipeline.popleft()  # not begun, and not to begin
        elif self._in_body:
            self.scope["state"]["error_type"] = found.error_type  # why the application finds the client gone
            self._abandon(self._refused)
        elif not self._is_answering():
            self._close(self._refused)

    def _abandon(self, refused: bytes) -> None:
        """The request is at work, and its body will never end."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self._close(b"" if self.cycle.response_started else refused)

    def _identity(self) -> str:
        """The request's id: the application's where it has begun."""
        begun: str | None = self.scope["state"].get("request_id") if self._in_body else None
        return begun or accept_id(Headers(raw=self.headers).get("x-request-id"))

    def _tell(self, found: Answer, identity: str) -> None:
        """Count it, and log it with as much of the request as is known; nothing that it sent but its path."""
        self.count(found.error_type)
        state = self.scope["state"] if self._in_body else {}
        client = state.get("client") or peer({"client": self.client})
        fields = {"status": found.status, "client": client, "error_type": found.error_type, "path": self._path()}
        token = request_id.set(identity)  # that of the request before may be set here
        logger.info("refused", extra={"fields": fields})
        request_id.reset(token)

    def _path(self) -> str:
        """What has come of it, or nothing; the rest of a URL, a query say, may hold anything."""
        try:
            path = httptools.parse_url(self.url).path or b""
        except httptools.HttpParserInvalidURLError:
            return ""
        return shown(unquote(path.decode("latin-1")))

    def _last_answer(self, found: Answer, message: str, identity: str) -> bytes:
        body = errors.body(found, message, openai=errors.OPENAI.match(self.url.decode("latin-1")) is not None)
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", identity.encode()),
            (b"connection", b"close"),
        ]
        return b"".join([STATUS_LINE[found.status], *(b"%s: %s\r\n" % header for header in headers), b"\r\n", body])

    def _close(self, last: bytes) -> None:
        """Send the last bytes, and let the client read them before the connection ends."""
        self.transport.write(last)
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._reading = self.loop.call_later(LINGER, self.transport.abort)

    # Writing in time

    def on_response_complete(self) -> None:
        if self._refused is not None and not self.pipeline and not self.transport.is_closing():
            self._close(self._refused)
            return
        super().on_response_complete()
        if self._reading is not None:  # a later request could not go on while this one was answered
            self._await_input(self.settings.body_seconds if self._in_body else self.settings.header_seconds)
        self._await_output()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_output()

    def _await_output(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        left = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self.settings.send_seconds, self._output_is_late, left) if left else None

    def _output_is_late(self, left: int) -> None:
        if self.transport.get_write_buffer_size() > max(0, left - PROGRESS):
            self.count(ANSWERS[Slow].error_type)
            self.transport.abort()
        else:
            self._await_output()


def _check(headers: list[tuple[bytes, bytes]], version: str) -> None:
    """Refuse what the parser lets through, and a proxy before us may read otherwise."""
    if version not in ("1.0", "1.1"):
        raise BadRequest(f"the request is in HTTP/{version}; write HTTP/1.1")
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise BadRequest("the transfer-encoding is not 'chunked' alone, in HTTP/1.1; no other is served")
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise BadRequest(f"the request has {hosts} host headers; HTTP/1.1 needs one")
