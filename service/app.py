"""The application: `create_app(settings)`."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from encoding.errors import ClozeError
from service import VERSION
from service.admission import Admission
from service.auth import Guard, Keys
from service.cache import Cache
from service.cpu import available_cpus, share_threads
from service.device import Device
from service.errors import respond
from service.health import HUNG, Health
from service.memory import keep_trimmed
from service.metrics import Metrics
from service.middleware import Door, Traffic
from service.models import Models
from service.routes import admin, docs, native, openai, page, status
from service.routes.common import of_model
from service.settings import Settings
from service.tracing import configure

__all__ = ["create_app"]

PUBLIC = ("/", "/playground/*", "/health", "/health/*", "/metrics", "/docs", "/docs/*", "/openapi.json")
BEARER = HTTPBearer(auto_error=False, description="An API key")  # says so in /docs; Door's guard is what checks

logger = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """Load the bundles, warm them up and put the routes around them; the lifespan begins to serve, and drains.

    Raises BundleError, SessionError or BadSettings where it cannot be served as asked.
    """
    guard = Guard(
        Keys.load(settings.api_keys.get_secret_value(), settings.api_key_file),
        Keys.load(settings.admin_keys.get_secret_value(), settings.admin_key_file),
        PUBLIC,
    )
    metrics, traffic, admission = Metrics(), Traffic(), Admission(settings.max_tokens_in_flight)
    workers = settings.tokenizer_threads or min(4, max(2, available_cpus() // 2))
    device = Device(workers, share_threads(settings.threads, settings.threads_per_batch))
    tracing = configure(settings.otlp_endpoint, "cloze", VERSION)
    cache = Cache(settings.cache_mb * 2**20)
    models = Models.load(settings, metrics, device, admission, cache)
    health = Health(lambda: models, lambda: device.busy_for, settings.stall_seconds, settings.fault_seconds)
    app = FastAPI(
        title="Cloze",
        description="Sentence embeddings from prompt templates: text-embeddings-inference's wire format, and OpenAI's.",
        version=VERSION,
        lifespan=_lifespan,
        openapi_url="/openapi.json" if settings.docs else None,
        docs_url=None,  # the framework's own would load its page from a CDN
        redoc_url=None,
        redirect_slashes=False,
        telemetry=tracing.telemetry,
    )
    app.state.settings, app.state.models, app.state.device = settings, models, device
    app.state.metrics, app.state.traffic, app.state.health, app.state.tracing = metrics, traffic, health, tracing
    for error in (ClozeError, RequestValidationError, HTTPException):
        app.add_exception_handler(error, _respond)
    _route(app, settings, guard)
    limit = settings.max_requests
    app.add_middleware(Door, traffic=traffic, metrics=metrics, guard=guard, admission=admission, limit=limit)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    metrics.watch(
        requests=lambda: traffic.in_flight,
        requests_limit=settings.max_requests,
        tokens=lambda: admission.tokens,
        tokens_limit=settings.max_tokens_in_flight,
        ready=lambda: health.ready,
        cache=cache,
    )
    return app


def _route(app: FastAPI, settings: Settings, guard: Guard) -> None:
    """Native routes twice: a client that takes no more than a URL chooses its model by `/models/NAME`."""
    keys = [Security(BEARER)] if guard.keys else []
    app.include_router(openai.router, dependencies=keys)
    app.include_router(native.router, dependencies=keys)
    app.include_router(native.router, prefix="/models/{model}", dependencies=[*keys, Depends(of_model)])
    app.include_router(native.roots, dependencies=keys)
    app.include_router(status.probes)
    app.include_router(status.router, dependencies=keys)
    app.include_router(admin.router, dependencies=[Security(BEARER)])
    if settings.docs:
        app.include_router(docs.router)
        app.mount("/docs", docs.assets)
    if settings.playground:
        app.include_router(page.router)
    else:
        app.add_api_route("/", status.ready, include_in_schema=False)  # as text-embeddings-inference's GET /


async def _respond(request: Request, error: Exception) -> Response:
    return respond(request, error)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    models: Models = app.state.models
    health: Health = app.state.health
    models.start()
    device: Device = app.state.device
    duties = [asyncio.create_task(health.watch()), asyncio.create_task(keep_trimmed())]
    yield
    health.stopping = True
    await models.stop()
    await asyncio.to_thread(app.state.tracing.close)
    for duty in duties:
        duty.cancel()
    await asyncio.gather(*duties, return_exceptions=True)
    if not await device.close(app.state.settings.stall_seconds):
        logger.critical("a batch hangs still: the process ends with status %d", HUNG)
        health.end(HUNG)
