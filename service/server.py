"""Running the application: uvicorn, which drains and says what it drained, and reloads on SIGHUP."""

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

from service.errors import BadSettings
from service.health import Health
from service.middleware import Traffic
from service.models import Models
from service.protocol import protocol
from service.settings import Settings

__all__ = ["FORCED", "bind", "configure", "resolve", "serve"]

FORCED: Final = 128 + signal.SIGINT  # the status that a shell gives for it

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Says how many requests were at work when it was told to stop, and what became of them."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, delay: float) -> None:
        super().__init__(config)
        self.traffic: Traffic = app.state.traffic
        self.health: Health = app.state.health
        self.models: Models = app.state.models
        self._delay = delay
        self._stop_at: float | None = None
        self._signal = 0
        self._reloads: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if hasattr(signal, "SIGHUP"):  # not on Windows
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        for listener in sockets or []:
            host, port, *_ = listener.getsockname()
            logger.info("serving http://%s:%d", f"[{host}]" if listener.family == socket.AF_INET6 else host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not ready from now on; the end begins after the delay, or at a second signal."""
        self.health.stopping = True
        if self._stop_at is not None or not self._delay:
            super().handle_exit(sig, frame)
            return
        self._stop_at, self._signal = monotonic() + self._delay, sig
        logger.info("not ready any more; stopping in %g s, at once at another signal", self._delay)

    async def on_tick(self, counter: int) -> bool:
        if self._stop_at is not None and monotonic() >= self._stop_at and not self.should_exit:
            super().handle_exit(self._signal, None)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        traffic, before = self.traffic, self.traffic.answered
        traffic.stopping = True
        for reload in self._reloads:
            reload.cancel()
        logger.info("stopping: no new connections, draining requests=%d", traffic.in_flight)
        await super().shutdown(sockets)
        drained = traffic.answered - (traffic.given_up - traffic.cut_short) - before  # a 503 is an answer
        logger.log(
            logging.WARNING if traffic.given_up else logging.INFO,
            "drained requests=%d given_up=%d answered_in_all=%d",
            drained,
            traffic.given_up,
            traffic.answered,
        )
        if self.force_exit:  # by a second SIGINT; the lifespan has not ended, and a thread may never
            logger.warning("ended by force")
            self.health.end(FORCED)

    def _reload(self) -> None:
        if self.health.stopping:
            return
        task = asyncio.create_task(self._reloaded(), name="reload")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reloaded(self) -> None:
        with contextlib.suppress(Exception):  # logged where it was raised
            await self.models.reload()


def serve(app: FastAPI, settings: Settings, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, and drain. The signal is then raised again, as uvicorn does."""
    Server(configure(app, settings), app, settings.stop_delay_seconds).run(sockets=[listener])


def configure(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """What is asked of uvicorn."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        http=protocol(settings, app.state.metrics.refused),
        ws="none",
        proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,  # uvicorn would believe all of this machine; a client lies
        lifespan="on",
        timeout_keep_alive=75,  # longer than a proxy's usual 60, so that the proxy closes first and no request is lost
        timeout_graceful_shutdown=settings.drain_seconds,
    )


def resolve(host: str, port: int) -> tuple[Any, ...]:
    """The first of its addresses, as the system gives it. Raises BadSettings where there is none."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a host"  # too long a label, say
        raise _unusable(host, port, reason) from error


def bind(host: str, port: int) -> socket.socket:
    """Take the address; nobody can connect until it is served. Raises BadSettings where it cannot be had."""
    family, kind, number, _, address = resolve(host, port)
    try:
        listener = socket.socket(family, kind, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _unusable(host, port, error.strerror) from error
    return listener


def _unusable(host: str, port: int, reason: str | None) -> BadSettings:
    return BadSettings(f"cannot listen on host {host!r:.200}, port {port}: {reason}; choose another")
