"""Running the application: uvicorn, which drains and says what it drained."""

import logging
import socket

import uvicorn
from fastapi import FastAPI

from service.errors import BadSettings
from service.middleware import Traffic
from service.settings import Settings

__all__ = ["bind", "serve"]

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Says how many requests were at work when it was told to stop, and what became of them."""

    def __init__(self, config: uvicorn.Config, traffic: Traffic) -> None:
        super().__init__(config)
        self.traffic = traffic

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port, *_ = listener.getsockname()
            logger.info("serving http://%s:%d", f"[{host}]" if listener.family == socket.AF_INET6 else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        traffic, before = self.traffic, self.traffic.answered
        traffic.stopping = True
        logger.info("stopping: no new connections, draining requests=%d", traffic.in_flight)
        await super().shutdown(sockets)
        drained = traffic.answered - traffic.given_up - before
        logger.log(
            logging.WARNING if traffic.given_up else logging.INFO,
            "drained requests=%d given_up=%d answered_in_all=%d",
            drained,
            traffic.given_up,
            traffic.answered,
        )


def serve(app: FastAPI, settings: Settings, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, and drain. The signal is then raised again, as uvicorn does."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        http="httptools",
        ws="none",
        lifespan="on",
        timeout_keep_alive=75,  # longer than a proxy's usual 60, so that the proxy closes first and no request is lost
        timeout_graceful_shutdown=settings.drain_seconds,
    )
    Server(config, app.state.traffic).run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """Take the address; nobody can connect until it is served. Raises BadSettings where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise BadSettings(f"cannot listen on host {host!r}, port {port}: {error.strerror}; choose another") from error
    return listener
