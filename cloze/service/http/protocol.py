"""uvicorn's HTTP protocol for this service.

It ignores offers to upgrade, limits the size and time of a request's head, and lets a request abort its connection.
"""

import asyncio
from itertools import chain
from typing import Any, Final

import httptools
import orjson
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

ABORT: Final = "cloze.abort"  # extension of the scope
SMALL: Final = 32_768  # bytes of a response part that is sent without waiting; the transport buffers twice as many
MAX_HEAD: Final = 65_536  # bytes of a request's first line and headers, or of a chunked body's trailers
MAX_WAITING: Final = 100  # requests of one connection that wait for the responses to earlier ones
UNREAD: Final = 10.0  # seconds that a closing connection waits for a client that does not read
OFFER: Final = (b"upgrade", b"http2-settings")  # headers, and options of `connection` that name them


def _refusal(status: str, media_type: str, body: bytes) -> bytes:
    """A response by the protocol itself, after which the connection is closed."""
    fields = [f"HTTP/1.1 {status}", f"content-type: {media_type}", f"content-length: {len(body)}", "connection: close"]
    return "\r\n".join([*fields, "", ""]).encode() + body


MALFORMED: Final = _refusal("400 Bad Request", "text/plain; charset=utf-8", b"Invalid HTTP request received.")
TOO_LARGE: Final = _refusal(
    "431 Request Header Fields Too Large",
    "application/json",
    orjson.dumps({"error": f"the request has more than {MAX_HEAD} bytes of headers", "error_type": "HeadersTooLarge"}),
)


class _Together:
    """A transport that joins small writes of one turn of the event loop, such as a response's head and body.

    That saves a system call, and the client a read. A large part is written at once, so that the transport knows how
    much of it waits for the client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, part: bytes) -> None:
        if len(part) > SMALL:
            self._send()
            if not self._transport.is_closing():
                self._transport.write(part)
            return
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(part)

    def close(self) -> None:
        self._send()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(UNREAD, self._transport.abort)  # does nothing if the connection has ended

    def _send(self) -> None:
        if self._parts and not self._transport.is_closing():  # its client may have disconnected since
            self._transport.write(b"".join(self._parts))
        self._parts.clear()


class _Flow(FlowControl):
    """Pauses reading while requests wait: the one before them has its complete body, and more input takes memory."""

    def __init__(self, transport: asyncio.Transport, protocol: "Protocol") -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.full:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """A server may ignore what `upgrade` offers (RFC 9110, section 7.8), but httptools would then skip the body.

    With each read, httptools copies what it has of a header line, in quadratic time and without a limit.
    """

    head_seconds = 60.0  # from the connection, or from the first bytes of a head, to the end of the head
    _head = 0  # bytes since the last head, or part of a body, was complete
    _begun = False  # whether a head has begun that is not complete
    _in_body = False  # which includes its trailers
    _late: asyncio.TimerHandle | None = None  # closes the connection if a head does not end
    _running: RequestResponseCycle | None = None  # the request being served; later ones wait in `pipeline`
    _refused: bytes | None = None  # the response to unreadable input, sent after those to earlier requests

    def connection_made(self, transport: Any) -> None:
        self._pieces = list[bytes]()  # of a body
        together: Any = _Together(transport, self.loop)
        super().connection_made(together)
        self.flow = _Flow(together, self)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)  # notifies the last request received, not an earlier one that is being served
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def on_message_begin(self) -> None:
        self._begun, self._in_body = True, False
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}  # a fresh scope of this request

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers are ignored (RFC 9110, section 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Raises HttpParserError for a transfer coding other than chunked, for too many waiting requests, and for too
        large a head that arrived in one read.
        """
        self._begun, self._in_body = False, True
        if len(self.url) + sum(map(len, chain.from_iterable(self.headers))) > MAX_HEAD:
            self._refuse(TOO_LARGE)
            raise httptools.HttpParserError("a head that is too large")
        self._head = 0
        self._stop_waiting()
        self._unset_keepalive_if_required()
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            raise httptools.HttpParserError("a transfer coding besides chunked")
        if len(self.pipeline) >= MAX_WAITING:
            raise httptools.HttpParserError("too many requests at once")
        if not self._offered:
            super().on_headers_complete()
            if self.parser.get_method() == b"CONNECT":  # httptools skips what follows it
                self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._serving or self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._refused is not None:
            self._end()
        elif (self._head or self._begun) and self._late is None:
            self._wait_for_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)  # a chunk may have a single byte

    def _take_body(self) -> None:
        """Pass on the parts of a body that one read brought."""
        if self._pieces:
            self._head = 0
            self._stop_waiting()  # a read with only a chunk's framing looked like the beginning of a head
            super().on_body(b"".join(self._pieces))
            self._pieces.clear()

    def on_message_complete(self) -> None:
        self._take_body()
        self._head = 0
        self._stop_waiting()
        if self._late_body:
            self.cycle.more_body = False
        elif not self._offered:
            super().on_message_complete()
            if not self.parser.should_keep_alive():  # because of a trailer, after which nothing is parsed
                self.cycle.keep_alive = False

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        if not self._late_body:  # which, however slow, does not stop the timer for the next request
            self._unset_keepalive_if_required()
        self._head += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offered:
                self._begin_again(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(MALFORMED)
        self._take_body()
        if self._head > MAX_HEAD:
            self._refuse(TOO_LARGE)
        elif (self._head or self._begun) and self._late is None and not self._serving:
            self._wait_for_head()  # not while a request is served: an empty line after it may come early

    def _refuse(self, answer: bytes) -> None:
        """Respond to unreadable input, after the responses to earlier requests, which are not affected."""
        if self._refused is not None or self.transport.is_closing():
            return
        self._refused, cycle = answer, self.cycle
        self._stop_waiting()
        if cycle is not None and cycle.more_body and not cycle.response_complete:  # in the body of the last one
            if self.pipeline:
                self.pipeline.popleft()
            elif not cycle.response_started:
                self._end()
                return
        if self._serving:
            self.flow.pause_reading()
        else:
            self._end()

    def _end(self) -> None:
        assert self._refused is not None, "only `_refuse` leads here. This is a bug."
        self.transport.write(self._refused)
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(self.head_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    @property
    def full(self) -> bool:
        """Whether reading is paused."""
        return bool(self.pipeline) or self._refused is not None

    @property
    def _serving(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def _late_body(self) -> bool:
        """Whether a request has been answered before the rest of its body has arrived."""
        return self.cycle is not None and bool(self.cycle.response_complete and self.cycle.more_body)

    @property
    def _offered(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _begin_again(self, unparsed: bytes) -> None:
        """Parse the request again, without the offer to upgrade."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(
                    option for option in value.split(b",") if option.strip().lower() not in OFFER
                ).strip()
            if name not in OFFER and (value or name != b"connection"):
                lines.append(b"%s: %s" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", b""]) + unparsed)
