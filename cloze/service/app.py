"""The application: `create_app(settings)`."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from cloze.encoding.bridge import Bridge
from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import ClozeError
from cloze.service import VERSION
from cloze.service.http import cohere, compare, embed, explain, openai, pages, predict, status, tokens
from cloze.service.http.auth import Authentication, Keys
from cloze.service.http.errors import handle_error
from cloze.service.http.middleware import RequestMiddleware
from cloze.service.http.request import JSONRoute
from cloze.service.inference.admission import Admission
from cloze.service.inference.health import HUNG, Health
from cloze.service.inference.model import Cache, Model
from cloze.service.inference.models import Models
from cloze.service.inference.threads import Executors, share_threads
from cloze.service.monitoring.background import Background
from cloze.service.monitoring.logs import LogQueue
from cloze.service.monitoring.metrics import Metrics
from cloze.service.monitoring.tracing import configure_tracing
from cloze.service.routes import PUBLIC, ROOT, SCHEMA
from cloze.service.services import Services, Traffic
from cloze.service.settings import Settings

DESCRIPTION = (
    "Sentence embeddings from prompt templates, in the wire formats of text-embeddings-inference, OpenAI and Cohere. "
    "If several models are served, a request names its model in the body or in the path: all routes that accept texts, "
    "/info, /health and /v1/models also exist under /models/NAME."
)
JSON_ROUTERS = (
    openai.posts,
    cohere.router,
    embed.router,
    compare.router,
    explain.router,
    predict.router,
    tokens.router,
)
BEARER = HTTPBearer(auto_error=False, description="An API key")  # for /docs; the middleware checks the key

logger = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """Load the bundles, warm them up and build the application. Its lifespan starts the models, and drains them.

    Raises BundleError, SessionError or OptionError if the settings cannot be served.
    """
    authentication = Authentication(
        Keys.load(settings.api_keys.get_secret_value()), Keys.load(settings.admin_keys.get_secret_value()), PUBLIC
    )
    metrics, traffic = Metrics(), Traffic()
    admission = Admission(settings.max_concurrent_requests, settings.max_tokens_in_flight, settings.max_bytes_in_flight)
    executors = Executors(share_threads(settings.threads))
    tracing = configure_tracing(settings.otlp_endpoint)
    cache = Cache(settings.cache_mb * 2**20)
    background = Background(metrics.background_errors)

    def load_model(bundle: Bundle, bridge: Bridge | None) -> Model:
        return Model(bundle, settings, executors, admission, cache, bridge)

    models = Models(settings, metrics, background, load_model)
    health = Health(models, lambda: executors.busy_for, background, settings.stall_seconds)
    app = FastAPI(
        title="Cloze",
        description=DESCRIPTION,
        version=VERSION,
        servers=[{"url": "."}],  # relative to the schema's own address, since a proxy may serve it under another path
        lifespan=_lifespan,
        openapi_url=SCHEMA.path if settings.ui else None,
        docs_url=None,  # FastAPI's own page loads files from a CDN
        redoc_url=None,
        redirect_slashes=False,
        telemetry=tracing.telemetry,
    )
    app.state.services = Services(settings, models, executors, admission, metrics, traffic, background, health, tracing)
    for error in (ClozeError, RequestValidationError, HTTPException):
        app.add_exception_handler(error, handle_error)
    _include_routers(app, settings, keys=bool(authentication.keys))
    app.add_middleware(
        RequestMiddleware,
        routes={
            route.path: route for router in JSON_ROUTERS for route in router.routes if isinstance(route, JSONRoute)
        },
        settings=settings,
        traffic=traffic,
        metrics=metrics,
        authentication=authentication,
        admission=admission,
        traced=tracing.provider is not None,
    )
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network="*" not in settings.origins,  # lets these origins reach a private network
        )
    _show(app.state.services, cache)
    return app


def _show(services: Services, cache: Cache) -> None:
    """Connect the gauges to the values that they show."""
    metrics, settings, admission = services.metrics, services.settings, services.admission
    LogQueue.on_drop = metrics.log_records_dropped.inc
    metrics.ready.set_function(lambda: float(services.health.ready))
    metrics.requests_in_flight.set_function(lambda: services.traffic.in_flight)
    metrics.requests_in_flight_limit.set(settings.max_concurrent_requests)
    metrics.bytes_in_flight.set_function(lambda: admission.bytes_in_flight)
    metrics.bytes_in_flight_limit.set(settings.max_bytes_in_flight)
    metrics.tokens_in_flight.set_function(lambda: admission.tokens_in_flight)
    metrics.tokens_in_flight_limit.set(settings.max_tokens_in_flight)
    metrics.cache_bytes.set_function(lambda: cache.currsize)
    metrics.cache_texts.set_function(lambda: len(cache))


def _include_routers(app: FastAPI, settings: Settings, *, keys: bool) -> None:
    needs_key = [Security(BEARER)] if keys else []
    for router in (*JSON_ROUTERS, openai.router, status.router):
        app.include_router(router, dependencies=needs_key)
    app.include_router(status.probes)
    app.include_router(status.admin, dependencies=[Security(BEARER)])
    if settings.ui:
        app.include_router(pages.router)
        app.mount("/docs", pages.DOCS_FILES)
        app.mount("/playground", pages.PLAYGROUND)
    else:
        app.add_api_route(ROOT.path, status.ready, methods=["GET", "HEAD"], include_in_schema=False)  # like TEI's GET /


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    services.models.start()
    services.health.watch()
    yield
    services.health.stopping = True
    services.health.unwatch()
    services.admission.close()
    await services.models.stop()
    await services.background.once("flush", partial(asyncio.to_thread, services.tracing.close))
    await services.background.stop()
    if not await services.executors.close(services.settings.stall_seconds):
        logger.critical("a batch still hangs: the process ends with status %d", HUNG)
        services.health.end(HUNG)
