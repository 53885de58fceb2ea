"""Around every request: its id, its key, the limit on those at work, metrics, a line in the log, a bug's answer."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from fastapi import Request
from opentelemetry.trace import get_current_span
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from encoding.errors import ClozeError
from service.admission import Admission, allowed
from service.auth import Guard, peer
from service.errors import Overloaded, Unavailable, answer, respond
from service.logs import accept_id, request_id, shown
from service.metrics import GONE, Metrics

__all__ = ["Door", "Traffic"]

logger = logging.getLogger(__name__)


class Traffic:
    """How many requests are at work, answered to the last byte, and given up because the process had to end.

    Who is given up is answered 503; `cut_short` is how many could not be, for their answer had begun.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.answered = 0
        self.given_up = 0
        self.cut_short = 0
        self.stopping = False


class Door:
    """Pure ASGI. Only POSTs that may count against `limit`: a full service still says how it is."""

    def __init__(
        self, app: ASGIApp, *, traffic: Traffic, metrics: Metrics, guard: Guard, admission: Admission, limit: int
    ) -> None:
        self.app = app
        self.traffic = traffic
        self.metrics = metrics
        self.guard = guard
        self.admission = admission
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
        scope.setdefault("state", {}).update(started=started, request_id=request_id.get())
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
        except ClientDisconnect:  # while its body was read; where the protocol gave it up, that is told already
            if "error_type" not in scope["state"]:
                self.metrics.dropped()
                self._log(scope, GONE, perf_counter() - started)
            return
        except Exception as error:
            if not isinstance(error, ClozeError):
                logger.exception("%s %s failed", scope["method"], shown(scope["path"]))
            if not status:
                await respond(Request(scope), error)(scope, receive, watched)
        except asyncio.CancelledError:
            if not self.traffic.stopping:
                raise
            self.traffic.given_up += 1  # the drain has lasted too long; the client shall know
            stopped = Unavailable("the service stopped before it could answer; send the request again")
            if status:  # by the end of its connection
                self.traffic.cut_short += 1
                scope["state"]["error_type"] = answer(stopped).error_type
                self._tell(scope, status, perf_counter() - started)
                raise
            await respond(Request(scope), stopped)(scope, receive, watched)
        self._tell(scope, status, perf_counter() - started)

    @contextmanager
    def _place(self, scope: Scope) -> Iterator[None]:
        """A place for a POST. A tenth of them is kept for clients that hold none, so that no one client takes all."""
        if scope["method"] != "POST":
            yield
            return
        client: str = scope["state"]["client"]
        places = allowed(self.limit, known=client in self._posts)
        if (taken := self._posts.total()) >= places:
            known = " for a client that has some at work" if places < self.limit else ""
            seconds = self.admission.retry_after()
            raise Overloaded(
                f"{taken} requests are at work, at most {places} may be{known}; send it again in {seconds} s",
                retry_after=seconds,
            )
        self._posts[client] += 1
        try:
            yield
        finally:
            self._posts[client] -= 1
            if not self._posts[client]:
                del self._posts[client]

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        """Count the answer, and log it."""
        self.metrics.answered(scope["method"], scope["path"], status, seconds, scope["state"].get("error_type"))
        self._log(scope, status, seconds)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        """Each POST and each refused key at info, what else is read at debug."""
        state = scope["state"]
        client = state.get("client", peer(scope))  # without a key that is known, by its address
        fields = {"status": status, "ms": round(1000 * seconds, 1), "client": client}
        for name in ("error_type", "model", "texts", "tokens"):
            if name in state:
                fields[name] = state[name]
        level = logging.INFO if scope["method"] == "POST" or status == 401 else logging.DEBUG
        logger.log(level, "%s %s", scope["method"], shown(scope["path"]), extra={"fields": fields})
