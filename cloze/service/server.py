"""Run the application under uvicorn: drain and report at the end, and reload on SIGHUP."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from time import monotonic
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from cloze.encoding.errors import ClozeError, OptionError
from cloze.service.http.protocol import Protocol
from cloze.service.services import Services
from cloze.service.settings import Settings

FORCED: Final = 128 + signal.SIGINT  # the status that a shell reports for Ctrl-C

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Reports how many requests were in flight when it was asked to stop, and how they ended."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(uvicorn_config(app, settings))
        self.services: Services = app.state.services
        self._settings = settings
        self._stop_at: float | None = None
        self._signal = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if hasattr(signal, "SIGHUP"):  # not on Windows
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        for listener in sockets or []:
            host, port, *_ = listener.getsockname()
            self._greet(f"http://{f'[{host}]' if listener.family == socket.AF_INET6 else host}:{port}")

    def _greet(self, url: str) -> None:
        """Log the address of the service, and a command to try it."""
        key = " -H 'authorization: Bearer KEY'" if self._settings.api_keys.get_secret_value() else ""
        logger.info("serving %s%s", url, "; playground at /, API reference at /docs" if self._settings.ui else "")
        logger.info(
            "try: curl %s/embed -H 'content-type: application/json'%s -d '%s'", url, key, '{"inputs": "A first text."}'
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop being ready at once, and shut down after the delay or at a second signal."""
        self.services.health.stopping = True
        if self._stop_at is not None or not self._settings.stop_delay_seconds:
            super().handle_exit(sig, frame)
            return
        self._stop_at, self._signal = monotonic() + self._settings.stop_delay_seconds, sig
        logger.info(
            "no longer ready; stopping in %g s, or at once after another signal", self._settings.stop_delay_seconds
        )

    async def on_tick(self, counter: int) -> bool:
        if self._stop_at is not None and monotonic() >= self._stop_at and not self.should_exit:
            super().handle_exit(self._signal, None)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        traffic, answered_before = self.services.traffic, self.services.traffic.answered
        traffic.stopping = True
        await self.services.background.stop("reload")
        logger.info("stopping: no new connections, draining requests=%d", traffic.in_flight)
        await super().shutdown(sockets)
        drained = (
            traffic.answered - (traffic.given_up - traffic.cut_short) - answered_before
        )  # a 503 counts as answered
        logger.log(
            logging.WARNING if traffic.given_up else logging.INFO,
            "drained requests=%d given_up=%d answered_in_all=%d",
            drained,
            traffic.given_up,
            traffic.answered,
        )
        if self.force_exit:  # by a second SIGINT; the lifespan has not ended, and a thread may hang
            logger.warning("ended by force")
            self.services.health.end(FORCED)

    def _reload(self) -> None:
        if not self.services.health.stopping:
            self.services.background.once("reload", self._reloaded)

    async def _reloaded(self) -> None:
        with contextlib.suppress(ClozeError):  # logged where it was raised
            await self.services.models.reload()


def serve(app: FastAPI, settings: Settings, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, and drain. uvicorn then raises the signal again.

    Raises OptionError if another process has started to listen on the address since it was bound.
    """
    server = Server(app, settings)
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(server.config.backlog)
    except OSError as error:
        raise _unusable(host, port, error.strerror) from error
    server.run(sockets=[listener])


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return the configuration of uvicorn."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        http=Protocol,
        ws="none",
        proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,  # by default uvicorn trusts every client on this machine
        lifespan="on",
        timeout_keep_alive=75,  # longer than a proxy's usual 60, so that the proxy closes first and no request is lost
        timeout_graceful_shutdown=settings.drain_seconds,
    )


def resolve(host: str, port: int) -> tuple[Any, ...]:
    """Return the first of the host's addresses, of IPv4 if it has any. Raises OptionError if it has none."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return min(addresses, key=lambda address: address[0] != socket.AF_INET)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"  # a label may be too long
        raise _unusable(host, port, reason) from error


def bind(host: str, port: int) -> socket.socket:
    """Bind the address; clients can connect once it is served. Raises OptionError if it is not available."""
    family, socket_type, number, _, address = resolve(host, port)
    try:
        listener = socket.socket(family, socket_type, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _unusable(host, port, error.strerror) from error
    return listener


def _unusable(host: str, port: int, reason: str | None) -> OptionError:
    return OptionError(f"cannot listen on host {host!r:.200}, port {port}: {reason}; choose another")
