"""The application: `create_app(settings)`."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from encoding.errors import ClozeError
from service.embedder import Embedder
from service.errors import respond
from service.metrics import Metrics
from service.middleware import Door, Traffic
from service.routes import native, status
from service.routes.status import describe
from service.settings import Settings

__all__ = ["create_app"]

logger = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """Load the bundle, warm it up and put the routes around it; the lifespan begins to serve, and drains.

    Raises BundleError or SessionError where the bundle cannot be served.
    """
    metrics, traffic = Metrics(), Traffic()
    embedder = Embedder.load(settings, metrics)
    app = FastAPI(
        title="Cloze",
        description="Sentence embeddings of one bundle, in text-embeddings-inference's wire format.",
        version=status.describe(embedder, settings).version,
        lifespan=_lifespan,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.settings, app.state.embedder = settings, embedder
    app.state.metrics, app.state.traffic = metrics, traffic
    for error in (ClozeError, RequestValidationError, HTTPException):
        app.add_exception_handler(error, _respond)
    app.add_middleware(Door, traffic=traffic, metrics=metrics, limit=settings.max_requests)
    app.include_router(native.router)
    app.include_router(status.router)
    batcher = embedder.batcher
    metrics.watch(lambda: traffic.in_flight, lambda: batcher.waiting_items, lambda: batcher.waiting)
    return app


async def _respond(request: Request, error: Exception) -> Response:
    return respond(request, error)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    embedder: Embedder = app.state.embedder
    info = describe(embedder, app.state.settings)
    logger.info(
        "bundle=%s dimension=%d template=%r provider=%s precision=%s threads=%d max_batch_tokens=%d",
        info.model_id,
        info.dimension,
        info.template.text,
        info.provider,
        embedder.session.precision,
        info.threads,
        info.max_batch_tokens,
    )
    app.state.metrics.inform(
        bundle=info.model_id, provider=info.provider, precision=embedder.session.precision, version=info.version
    )
    embedder.start()
    yield
    await embedder.stop()
