"""Request middleware: id, authentication, admission, body limits, deadline, metrics and one log line per request.

Plain ASGI, around the whole application. A path under `/models/NAME` and an unversioned path of OpenAI's are rewritten
to the one route that serves them (service/routes.py); `cloze.model` in the scope is the model that the path names. A
route with a JSON body is called directly from here, because FastAPI's own layers take longer than a short text.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Final

from opentelemetry.trace import get_current_span
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloze.service.client import STRIDES, Client
from cloze.service.errors import INTERNAL, BodyTooLarge, DeadlineExceeded, RequestTimeout, Unavailable, ValidationFailed
from cloze.service.http.auth import ADMIN, Authentication
from cloze.service.http.errors import error_response, handle_error
from cloze.service.http.protocol import ABORT, SMALL
from cloze.service.http.request import JSONRoute, headers_of
from cloze.service.inference.admission import Admission
from cloze.service.monitoring.logs import RequestRecord, accept_id, current_request, shown
from cloze.service.monitoring.metrics import CLIENT_GONE, DROPPED, Metrics
from cloze.service.routes import MODEL_ROUTES, label, resolve
from cloze.service.services import Traffic
from cloze.service.settings import Settings

DISCARD: Final = 4  # read and discard up to this multiple of the body limit, so that the client receives the 413
NOSNIFF: Final = (b"x-content-type-options", b"nosniff")  # an error may quote what was sent
DAY: Final = 86_400.0  # seconds
LOOK: Final = 0.1  # seconds until a request is watched: for its limits, and for a client that disconnects

logger = logging.getLogger(__name__)


@dataclass
class RequestMiddleware:
    """Only POSTs need admission, so a full service still answers probes. All but admin requests have a deadline."""

    app: ASGIApp
    routes: Mapping[str, JSONRoute]  # by path
    settings: Settings
    traffic: Traffic
    metrics: Metrics
    authentication: Authentication
    admission: Admission
    traced: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        identity = accept_id(headers_of(scope).get("x-request-id"))
        address = str(scope["client"][0]) if scope.get("client") else "local"  # a Unix socket
        request = RequestRecord(identity, scope["path"], perf_counter(), Client(address))
        token = current_request.set(request)
        self.traffic.in_flight += 1
        try:
            await _Exchange(self, request, scope, receive, send).serve()
        finally:
            self.traffic.in_flight -= 1
            current_request.reset(token)


@dataclass
class _Exchange:
    """One request and its response."""

    middleware: RequestMiddleware
    request: RequestRecord
    scope: Scope
    _receive: Receive
    _send: Send
    _hold: Callable[[int], None] = lambda count: None  # counts bytes as in flight, until the end of the request
    _received: int = 0  # bytes of the body
    _status: int = 0  # 0 until the response has begun
    _body_read: bool = False
    _watched: bool = False  # for a disconnect
    _answered: bool = False
    _reason: Callable[[], Exception] | None = None  # makes the error that is the reason for cancelling the request
    _watches: list["asyncio.TimerHandle | asyncio.Task[None]"] = field(default_factory=list)

    async def serve(self) -> None:
        if self.middleware.traced:
            get_current_span().set_attribute("cloze.request_id", self.request.id)
        traffic = self.middleware.traffic
        try:
            await self._answer()
        except asyncio.CancelledError:
            if not traffic.stopping:
                raise
            traffic.given_up += 1  # the drain lasted too long
            if self._status:  # uvicorn closes the connection of an incomplete response
                traffic.cut_short += 1
                self.request.error_type = "Unhealthy"
            else:
                await self._refuse(Unavailable("the service stopped before it could answer; send the request again"))
        self._report()

    async def _answer(self) -> None:
        """Run the route, and respond to its error."""
        try:
            await self._admit()
        except ClientDisconnect:
            self._status = CLIENT_GONE
            self.middleware.metrics.failures.labels(DROPPED).inc()
        except Exception as error:
            if error_response(error) is INTERNAL:
                logger.exception("%s %s failed", self.scope["method"], shown(self.request.path))
            if not self._status:
                await self._discard()
                await self._refuse(error)
            else:
                await self._abort(error)

    async def _admit(self) -> None:
        middleware = self.middleware
        # First, so that a refusal has the shape and the label of its route.
        self.scope["path"], self.scope["cloze.model"] = resolve(self.scope["method"], self.scope["path"])
        if middleware.authentication.keys or self.request.path.startswith(ADMIN):
            client = middleware.authentication.client(self.scope, self.request.path)
            self.request.client = client or self.request.client
        if self.scope["path"].startswith(ADMIN):
            await middleware.app(self.scope, self.receive, self.send)
            return
        if self.scope["method"] != "POST":
            self._body_read = True  # no route reads a body
            await self._run_within_limits()
            return
        self.request.client = _in_class(self.request.client, self.scope)
        with middleware.admission.request(self.request.client) as self._hold:
            if self._declared <= middleware.settings.payload_limit:
                self._hold(self._declared)
            await self._run_within_limits()

    async def _run_within_limits(self) -> None:
        """Run the route. Cancel it at its time limits, or when its client disconnects.

        The time starts with the request's head, so it includes receiving the body.
        """
        seconds, running = _deadline(self.scope, self.middleware.settings.request_seconds), asyncio.current_task()
        began = asyncio.get_running_loop().time() - (perf_counter() - self.request.started)
        self._look_later(running, seconds, began)
        try:
            await self._run()
        except asyncio.CancelledError:
            if self._reason is None or running is None:
                raise
            running.uncancel()
            raise self._reason() from None
        finally:
            for watch in self._watches:
                watch.cancel()

    def _look_later(self, running: "asyncio.Task[object] | None", seconds: float, began: float) -> None:
        """Schedule the next `_look`, at the latest for the next limit. The request's own task never runs it."""
        loop = asyncio.get_running_loop()
        remaining = began + self._limit(seconds) - loop.time()
        wait = max(0.0, min(remaining, DAY if self._watched else LOOK))
        self._watches.append(loop.call_later(wait, self._look, running, seconds, began))

    def _look(self, running: "asyncio.Task[object] | None", seconds: float, began: float) -> None:
        """Cancel the running task at a limit, or look again. Once the body has been read, watch for a disconnect."""
        limit = self._limit(seconds)
        if asyncio.get_running_loop().time() >= began + limit:
            self._stop(running, partial(_too_late, limit, body=limit != seconds))
            return
        if self._body_read and not self._watched:
            self._watched = True
            self._watches.append(asyncio.create_task(self._watch(running)))
        self._look_later(running, seconds, began)

    def _limit(self, seconds: float) -> float:
        """The limit in seconds from the beginning: the request's, and the body's until the body has been read."""
        return min(seconds, math.inf if self._body_read else self.middleware.settings.body_seconds)

    async def _watch(self, running: "asyncio.Task[object] | None") -> None:
        """Cancel the request when its client disconnects, so that its texts leave the queue."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._answered:  # a disconnect is also received after a complete response
            self._stop(running, ClientDisconnect)

    def _stop(self, running: "asyncio.Task[object] | None", reason: Callable[[], Exception]) -> None:
        assert running is not None
        self._reason = reason
        running.cancel()

    async def _run(self) -> None:
        route = self.middleware.routes.get(self.scope["path"])
        if route is None or self.scope["method"] != "POST":
            await self.middleware.app(self.scope, self.receive, self.send)
            return
        if self.middleware.traced:
            span = get_current_span()  # FastAPI's router, which is not called, would name it
            span.update_name(f"{self.scope['method']} {route.path}")
            span.set_attribute("http.route", route.path)
        response = await route.serve(Request(self.scope, self.receive))
        self._hold(next(int(value) for name, value in response.raw_headers if name == b"content-length"))
        await response(self.scope, self.receive, self.send)

    @property
    def _declared(self) -> int:
        """Return the size of the body in bytes by its content-length header; 0 without one."""
        length = headers_of(self.scope).get("content-length", "")
        return int(length) if length.isdecimal() else 0

    async def receive(self) -> Message:
        """Receive a part of the body, within the size limit if a route reads it."""
        message = await (self._receive_within_limit() if self.scope["method"] == "POST" else self._receive())
        self._body_read |= message["type"] == "http.request" and not message.get("more_body")
        return message

    async def _receive_within_limit(self) -> Message:
        """Discard a body that is too large, up to DISCARD times the limit, and then raise BodyTooLarge."""
        limit, declared = self.middleware.settings.payload_limit, self._declared
        while max(declared, self._received) <= DISCARD * limit:
            message = await self._receive()
            self._received += len(message.get("body", b""))
            if message["type"] != "http.request" or max(declared, self._received) <= limit:
                self._hold(0 if declared else len(message.get("body", b"")))
                return message
            if not message.get("more_body"):
                break
        size = declared or f"more than {limit}"
        raise BodyTooLarge(f"the body has {size} bytes; at most {limit} are allowed: send fewer texts at a time")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            added = ((b"x-request-id", self.request.id.encode()), NOSNIFF)
            message = {**message, "headers": [*message["headers"], *added]}
        if message["type"] != "http.response.body" or message.get("more_body"):
            await self._send(message)
            return
        if len(message.get("body", b"")) > SMALL:
            await self._send({**message, "more_body": True})
            message = {"type": "http.response.body"}  # sent when the client has read most of the response
        await self._send(message)
        self._answered = True
        self.middleware.traffic.answered += 1

    async def _discard(self) -> None:
        """Read the body of a refused request whose connection closes afterwards, within the limits of a body.

        Closing a connection with unread bytes would reset it, and the client would lose the response.
        """
        headers, settings = headers_of(self.scope), self.middleware.settings
        connection = {option.strip() for option in headers.get("connection", "").lower().split(",")}
        closes = self.scope.get("http_version") == "1.0" or "close" in connection
        if not closes or self._body_read or self._received or "expect" in headers:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.body_seconds):
                while max(self._declared, self._received) <= DISCARD * settings.payload_limit:
                    message = await self._receive()
                    self._received += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return

    async def _refuse(self, error: Exception) -> None:
        """Respond with an error. A client that does not read it in the time that a body has loses its connection."""
        response = await handle_error(Request(self.scope), error)
        try:
            async with asyncio.timeout(self.middleware.settings.body_seconds):
                await response(self.scope, self.receive, self.send)
        except TimeoutError:
            await self._abort(error)

    async def _abort(self, error: Exception) -> None:
        """Abort the connection if a response has begun, so that its client sees the error and its bytes are freed.

        Otherwise a client that does not read could keep the connection and the bytes indefinitely.
        """
        known = error_response(error)
        self._status, self.request.error_type = known.status, known.error_type
        connection = self.scope.get("extensions", {}).get(ABORT)
        if connection is not None:
            connection["abort"]()
            while (await self._receive())["type"] != "http.disconnect":
                pass

    def _report(self) -> None:
        """Count the request, and log it: POSTs and refused keys at info, other requests at debug."""
        request, seconds, metrics = self.request, perf_counter() - self.request.started, self.middleware.metrics
        route = label(self.scope["method"], self.scope["path"])
        if self._status != CLIENT_GONE or self._body_read:
            metrics.requests.labels(route, str(self._status)).inc()
        if request.error_type is not None:
            metrics.failures.labels(request.error_type).inc()
        elif route in MODEL_ROUTES and self._status < 400:
            metrics.request_seconds.labels(route, request.client.priority).observe(seconds)
        fields = {"status": self._status, "ms": round(1000 * seconds, 1), "client": request.client.name}
        for name in ("error_type", "model", "texts", "tokens"):
            if (value := getattr(request, name)) is not None:
                fields[name] = value
        if request.client.priority == "bulk":
            fields["priority"] = "bulk"
        level = logging.INFO if self.scope["method"] == "POST" or self._status == 401 else logging.DEBUG
        logger.log(level, "%s %s", self.scope["method"], shown(request.path), extra={"fields": fields})


def _too_late(seconds: float, *, body: bool) -> Exception:
    if body:
        return RequestTimeout(
            f"the request's body did not arrive within {seconds:g} s, the limit; send fewer texts at a time"
        )
    return DeadlineExceeded(
        f"the request was not answered within {seconds:g} s, its time limit; send fewer texts, or send it later"
    )


def _in_class(client: Client, scope: Scope) -> Client:
    """Return the client in the class that its request's `x-priority` names. A client whose key is bulk stays bulk."""
    priority = headers_of(scope).get("x-priority", client.priority)
    if priority not in STRIDES:
        raise ValidationFailed(f"the header x-priority is {priority!r:.50}; write interactive, the default, or bulk")
    return client._replace(priority="bulk") if priority == "bulk" else client


def _deadline(scope: Scope, limit: float) -> float:
    """Return the seconds that a request has: the setting's, or fewer if its `x-request-timeout` says so."""
    header = headers_of(scope).get("x-request-timeout")
    if header is None:
        return limit
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValidationFailed(f"the header x-request-timeout is {header!r:.50}; write a number of seconds above 0")
    return min(seconds, limit)
