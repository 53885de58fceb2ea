"""What operators ask: GET /health and its parts, /info, /metrics."""

from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from encoding.bundle import GRAPHS
from service import VERSION
from service.embedder import Embedder
from service.errors import ErrorBody
from service.models import Models
from service.routes.common import ERRORS, of_model, pick
from service.routes.native import CELLS, CHARACTERS, IDS
from service.routes.schemas import Info, TemplateInfo
from service.settings import Settings

__all__ = ["probes", "ready", "router"]

DTYPES = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": ErrorBody, "description": "Not ready; the text says why"}}
UNKNOWN: dict[int | str, dict[str, Any]] = {404: ERRORS[404]}

probes = APIRouter(tags=["status"], default_response_class=Response)  # for these no key is needed
router = APIRouter(tags=["status"], responses={401: ERRORS[401]})


@probes.head("/health", include_in_schema=False)
@probes.get("/health", responses=NOT_READY, summary="Whether every model answers")
@probes.head("/health/ready", include_in_schema=False)
@probes.get("/health/ready", responses=NOT_READY, summary="The same")
async def ready(request: Request) -> Response:
    """Empty where every model answers; after a failed batch the model is tried first. Busy is ready."""
    await request.app.state.health.check()
    return Response()


@probes.head("/health/live", include_in_schema=False)
@probes.get("/health/live", summary="Whether the process answers")
async def live() -> Response:
    return Response()


@probes.head("/health/startup", include_in_schema=False)
@probes.get("/health/startup", summary="Whether every model is loaded and warmed up")
async def startup() -> Response:
    """The port opens only then, so the answer is 200 or none."""
    return Response()


@router.get("/info", summary="The default model, its template and limits")
async def info(request: Request) -> Info:
    return describe(pick(request), request.app.state.models, request.app.state.settings)


@router.get("/models/{model}/info", responses=UNKNOWN, dependencies=[Depends(of_model)], summary="One model")
async def info_of_model(request: Request) -> Info:
    return describe(pick(request), request.app.state.models, request.app.state.settings)


@router.get(
    "/models/{model}/health",
    response_class=Response,
    responses={**NOT_READY, **UNKNOWN},
    dependencies=[Depends(of_model)],
)
async def health_of_model(request: Request) -> Response:
    """Whether one model answers, for a client that takes only that model's URL."""
    await request.app.state.health.check(pick(request))
    return Response()


@probes.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def describe(embedder: Embedder, models: Models, settings: Settings) -> Info:
    bundle, session = embedder.bundle, embedder.session
    spec, encoder = bundle.spec, bundle.text_encoder
    return Info(
        model_id=embedder.name,
        model_sha=spec.files[GRAPHS[session.precision]],
        model_dtype=DTYPES[session.precision],
        served_model_name=embedder.name,
        model_type={"embedding": {"pooling": spec.pooling}},
        max_concurrent_requests=settings.max_requests,
        max_input_length=spec.max_tokens,
        max_batch_tokens=embedder.max_batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=settings.max_inputs,
        auto_truncate=settings.truncate,
        tokenization_workers=embedder.device.workers,
        version=VERSION,
        sha=None,
        docker_label=None,
        dimension=spec.dimension,
        provider=session.provider,
        threads=embedder.device.threads.batches * embedder.device.threads.per_batch,
        threads_per_batch=embedder.device.threads.per_batch,
        token_ids=settings.token_ids,
        vocabulary_size=encoder.vocabulary_size,
        max_tokens_in_flight=settings.max_tokens_in_flight,
        max_text_characters=settings.max_text_characters,
        max_body_bytes=settings.max_body_bytes,
        max_similarities=CELLS,
        max_tokenize_characters=CHARACTERS,
        max_decode_ids=IDS,
        template=TemplateInfo(
            text=spec.template,
            pooling=spec.pooling,
            template_tokens=encoder.template_tokens,
            text_tokens=encoder.text_tokens,
            final_period=spec.final_period,
            denoising=spec.denoising,
        ),
        models=models.names,
        default_model=models.default,
    )
