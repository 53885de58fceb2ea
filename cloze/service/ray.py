"""`serve run cloze.service.ray:app`: replicas of the application on a Ray cluster.

Ray Serve starts the replicas, routes requests to them, scales and replaces them, and publishes their metrics. Each
replica is the complete application, with its own batches, limits and cache. Needs the extra `ray`.
"""

import math
import os
from collections.abc import Callable
from typing import Final

import ray
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig
from ray.serve.metrics import Gauge
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloze.encoding.errors import OptionError
from cloze.service.errors import Unavailable
from cloze.service.http.errors import response_to
from cloze.service.inference.health import Health
from cloze.service.monitoring.logs import configure_logs
from cloze.service.routes import shape_of
from cloze.service.settings import Settings

TARGET: Final = 8  # requests in flight per replica: more gain little throughput (docs/notes/scale.md has the figures)
RETRY_AFTER: Final = 5  # seconds
STOPPING: Final = 5  # seconds for the lifespan to end, after the drain
PERIOD: Final = 5.0  # seconds between two publications of the metrics
LOST: Final = "the replica stopped before it could answer; send the request again"

ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",  # otherwise Ray sends usage data to its vendor
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cloze.service.ray:proxy_middleware",
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",  # otherwise a proxy fills the replicas on its node first
}
os.environ.update(ENVIRONMENT | dict(os.environ))  # for a cluster that `serve run` starts; others set it on each node


class Replicas(BaseModel):
    """The arguments of `serve run cloze.service.ray:app NAME=VALUE`, which are `args` in a Serve config file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    num_cpus: float = Field(1, gt=0, description="CPUs per replica, and its number of threads that run graphs.")
    num_gpus: float = Field(0, ge=0, description="GPUs per replica. 0.25: four replicas share one GPU.")


def app(arguments: Replicas) -> serve.Application:
    """Build the application that Ray Serve runs, from the environment's CLOZE_ settings. Raises OptionError.

    The settings are read here, once, and every replica receives them.
    """
    settings = Settings.read([])
    if settings.admin_keys.get_secret_value():
        raise OptionError("CLOZE_ADMIN_KEYS is set, but /admin/reload would reach one replica only; unset it")
    limit = settings.max_concurrent_requests
    deployment = serve.deployment(
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.min_replicas, max_replicas=arguments.max_replicas, target_ongoing_requests=TARGET
        ),
        ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        max_ongoing_requests=2 * limit,  # a replica refuses what is over its own limit, and says when to try again
        max_queued_requests=limit,  # in each proxy, while no replica takes requests
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER),
        graceful_shutdown_timeout_s=settings.drain_seconds + STOPPING,
    )(Cloze)
    return deployment.bind(settings)


@serve.ingress()
class Cloze:
    """One replica."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._health: Health

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Load the bundles and build the application, as `cloze serve` does."""
        # imports ONNX Runtime, which the proxies and the controller do not need
        from cloze.service.app import create_app

        configure_logs(self._settings.log_level, self._settings.log_format)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        threads = self._settings.threads or max(1, math.floor(cpus))  # other replicas share the node
        application = create_app(self._settings.model_copy(update={"threads": threads}))
        services = application.state.services
        self._health = services.health
        services.background.every(PERIOD, "publish", Publisher(services.metrics.text))
        return application

    async def check_health(self) -> None:
        """Raise Unavailable if the replica is not ready. Serve replaces it after three failures."""
        await self._health.check()


class Publisher:
    """Sets a Ray gauge for every sample of the metrics. Ray labels each with the replica's id.

    Counters and the buckets of histograms are gauges too: Ray's counters and histograms cannot be set to a known value,
    and Ray keeps exporting the counters of a lost replica. Prometheus computes rates and quantiles in the same way.
    """

    def __init__(self, text: Callable[[], bytes]) -> None:
        self._text = text
        self._gauges: dict[str, Gauge] = {}

    async def __call__(self) -> None:
        for family in text_string_to_metric_families(self._text().decode()):
            for sample in family.samples:
                if sample.name not in self._gauges:
                    self._gauges[sample.name] = Gauge(sample.name, family.documentation, tuple(sample.labels))
                self._gauges[sample.name].set(sample.value, sample.labels)


def proxy_middleware() -> list[Middleware]:
    """Return the middleware that every HTTP proxy of Ray adds."""
    return [Middleware(ProxyMiddleware)]


class ProxyMiddleware:
    """Responds 503, not Ray's bare 500, if a replica is lost before it responds; sends one `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["x-request-id"]  # the replica's; Ray has added its own
            await send(message)

        await self.app(scope, receive, watch)
        if scope["type"] == "http" and not started:
            await response_to(Unavailable(LOST, RETRY_AFTER), shape=shape_of(scope["path"]))(scope, receive, send)
