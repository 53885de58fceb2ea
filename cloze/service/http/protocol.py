"""uvicorn's HTTP protocol for this service.

An offer to upgrade is ignored, a head has limits of size and time, and a request can abort its connection.
"""

import asyncio
from itertools import chain
from typing import Any, Final

import httptools
import orjson
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

ABORT: Final = "cloze.abort"  # extension of the scope
SMALL: Final = 32_768  # bytes of a part of an answer for which nothing waits; the transport lets twice as many wait
MAX_HEAD: Final = 65_536  # bytes of a request's first line and headers, or of a chunked body's trailers
MAX_WAITING: Final = 100  # requests of one connection that wait for the answers of those before them
UNREAD: Final = 10.0  # seconds that a connection which is closed waits for a client that does not read
OFFER: Final = (b"upgrade", b"http2-settings")  # headers, and what `connection` says of them


def _refusal(status: str, media_type: str, body: bytes) -> bytes:
    """An answer of the protocol's own, behind which the connection is closed."""
    fields = [f"HTTP/1.1 {status}", f"content-type: {media_type}", f"content-length: {len(body)}", "connection: close"]
    return "\r\n".join([*fields, "", ""]).encode() + body


MALFORMED: Final = _refusal("400 Bad Request", "text/plain; charset=utf-8", b"Invalid HTTP request received.")
TOO_LARGE: Final = _refusal(
    "431 Request Header Fields Too Large",
    "application/json",
    orjson.dumps({"error": f"the request has more than {MAX_HEAD} bytes of headers", "error_type": "HeadersTooLarge"}),
)


class _Together:
    """A transport that sends small parts together at the end of the loop's turn: an answer's head with its body.

    That saves a system call, and the client a read. A large part is not held back, so that the transport can say how
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
            self._loop.call_later(UNREAD, self._transport.abort)  # of one that has ended it does nothing

    def _send(self) -> None:
        if self._parts and not self._transport.is_closing():  # its client may have left since
            self._transport.write(b"".join(self._parts))
        self._parts.clear()


class _Flow(FlowControl):
    """Reads nothing while requests wait: the one before them has its whole body, and what comes takes memory."""

    def __init__(self, transport: asyncio.Transport, protocol: "Protocol") -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.full:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """A server may ignore what `upgrade` offers (RFC 9110, section 7.8); httptools would leave out the body then.

    httptools copies what it has of a header's line with each read, in quadratic time, and knows no limit.
    """

    head_seconds = 60.0  # from the connection, or the first bytes of a head, to its end
    _head = 0  # bytes since the last head, or part of a body, was complete
    _begun = False  # a head that is not complete
    _in_body = False  # and so in its trailers
    _late: asyncio.TimerHandle | None = None  # closes the connection of a head that does not end
    _running: RequestResponseCycle | None = None  # the request that is served; those behind it wait in `pipeline`
    _refused: bytes | None = None  # the answer to what cannot be read, behind those to the requests before it

    def connection_made(self, transport: Any) -> None:
        self._pieces = list[bytes]()  # of a body
        together: Any = _Together(transport, self.loop)
        super().connection_made(together)
        self.flow = _Flow(together, self)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)  # which tells the last request that came, and not the one before it that is served
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def on_message_begin(self) -> None:
        self._begun, self._in_body = True, False
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}  # a fresh scope of this request

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # and not a trailer (RFC 9110, section 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Raises HttpParserError for a body in a coding that nothing here undoes, for too many waiting requests, and
        for too large a head that came in one read.
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
            if self.parser.get_method() == b"CONNECT":  # of which httptools leaves out what follows
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
        """Take what one read brought of a body."""
        if self._pieces:
            self._head = 0
            self._stop_waiting()  # a read of a chunk's framing alone looked like the beginning of a head
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
            if not self.parser.should_keep_alive():  # by a trailer, behind which nothing more is parsed
                self.cycle.keep_alive = False

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        if not self._late_body:  # of which nothing ends the wait for the next request, however slowly it comes
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
            self._wait_for_head()  # not beside a request, behind which an empty line may come early

    def _refuse(self, answer: bytes) -> None:
        """Answer what cannot be read, behind the answers to the requests before it, of which it says nothing."""
        if self._refused is not None or self.transport.is_closing():
            return
        self._refused, cycle = answer, self.cycle
        self._stop_waiting()
        if cycle is not None and cycle.more_body and not cycle.response_complete:  # it is in the body of the last one
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
        """Whether nothing more is to be read for now."""
        return bool(self.pipeline) or self._refused is not None

    @property
    def _serving(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def _late_body(self) -> bool:
        """Whether the rest of a body is still to come whose request has been answered."""
        return self.cycle is not None and bool(self.cycle.response_complete and self.cycle.more_body)

    @property
    def _offered(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _begin_again(self, unparsed: bytes) -> None:
        """Read the request once more, without the offer."""
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
