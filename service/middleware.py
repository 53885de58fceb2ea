"""Around every request: its id, its key, the limit on those at work, metrics, a line in the log, a bug's answer."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from urllib.parse import quote

from fastapi import Request
from opentelemetry.trace import get_current_span
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from encoding.errors import ClozeError
from service.auth import Guard
from service.errors import Overloaded, Unavailable, respond
from service.logs import accept_id, request_id
from service.metrics import Metrics

__all__ = ["Door", "Traffic"]

logger = logging.getLogger(__name__)

SHOWN = 200  # characters of a path in the log


class Traffic:
    """How many requests are at work, answered to the last byte, and given up because the process had to end."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.answered = 0
        self.given_up = 0
        self.stopping = False


class Door:
    """Pure ASGI. Only POSTs that may count against `limit`: a full service still says how it is."""

    def __init__(self, app: ASGIApp, *, traffic: Traffic, metrics: Metrics, guard: Guard, limit: int) -> None:
        self.app = app
        self.traffic = traffic
        self.metrics = metrics
        self.guard = guard
        self.limit = limit
        self._posts = Counter[str]()  # at work, by client; no client without any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        token = request_id.set(accept_id(Headers(scope=scope).get("x-request-id")))
        self.traffic.in_flight += 1
        try:
            await self._serve(scope, receive, send)
        finally:
            self.traffic.in_flight -= 1
            request_id.reset(token)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = perf_counter(), 0
        scope.setdefault("state", {})["started"] = started
        get_current_span().set_attribute("cloze.request_id", request_id.get())  # of no span: it costs nothing

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id.get()
                headers["x-content-type-options"] = "nosniff"  # an error may quote what was sent
            if message["type"] != "http.response.body" or message.get("more_body"):
                await send(message)
                return
            await send({**message, "more_body": True})
            await send({"type": "http.response.body"})  # waits until the client has taken most of what was before it
            self.traffic.answered += 1

        try:
            self.guard.admit(scope)
            with self._place(scope):
                await self.app(scope, receive, watched)
        except ClientDisconnect:  # while its body was read; where the protocol gave it up, that is counted already
            if "error_type" not in scope["state"]:
                self.metrics.dropped()
            return
        except Exception as error:
            if not isinstance(error, ClozeError):
                logger.exception("%s %s failed", scope["method"], quote(scope["path"])[:SHOWN])
            if not status:
                await respond(Request(scope), error)(scope, receive, watched)
        except asyncio.CancelledError:
            if not self.traffic.stopping or status:
                raise
            self.traffic.given_up += 1  # the drain has lasted too long; the client shall know
            stopped = Unavailable("the service stopped before it could answer; send the request again")
            await respond(Request(scope), stopped)(scope, receive, watched)
        self._tell(scope, status, perf_counter() - started)

    @contextmanager
    def _place(self, scope: Scope) -> Iterator[None]:
        """A place for a POST. A tenth of them is kept for clients that hold none, so that no one client takes all."""
        if scope["method"] != "POST":
            yield
            return
        client: str = scope["state"]["client"]
        places = self.limit - self.limit // 10 if client in self._posts else self.limit
        if (taken := self._posts.total()) >= places:
            known = " for a client that has some at work" if places < self.limit else ""
            raise Overloaded(f"{taken} requests are at work, at most {places} may be{known}; send it again later")
        self._posts[client] += 1
        try:
            yield
        finally:
            self._posts[client] -= 1
            if not self._posts[client]:
                del self._posts[client]

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        """Count the answer, and log it: each POST at info, the probes and scrapes at debug."""
        state = scope["state"]
        self.metrics.answered(scope["method"], scope["path"], status, seconds, state.get("error_type"))
        fields = {"status": status, "ms": round(1000 * seconds, 1), "client": state.get("client", "unknown")}
        for name in ("error_type", "model", "texts", "tokens"):
            if name in state:
                fields[name] = state[name]
        level = logging.INFO if scope["method"] == "POST" else logging.DEBUG
        path = quote(scope["path"])[:SHOWN]  # a blank in it could forge a field
        logger.log(level, "%s %s", scope["method"], path, extra={"fields": fields})
