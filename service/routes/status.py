"""What operators ask: GET /health, /info, /metrics."""

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from encoding.bundle import GRAPHS
from service.embedder import Embedder
from service.errors import ErrorBody
from service.routes.schemas import Info, TemplateInfo
from service.settings import Settings

__all__ = ["router"]

router = APIRouter(tags=["status"])


def _version() -> str:
    try:
        return version("cloze")
    except PackageNotFoundError:
        return "unknown"


@router.get("/health", responses={200: {"description": "The model answers"}, 503: {"model": ErrorBody}})
async def health(request: Request) -> Response:
    """Empty where the model answers; after a failed batch the model is tried first."""
    await request.app.state.embedder.check()
    return Response()


@router.get("/info")
async def info(request: Request) -> Info:
    return describe(request.app.state.embedder, request.app.state.settings)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def describe(embedder: Embedder, settings: Settings) -> Info:
    bundle, session = embedder.bundle, embedder.session
    spec, encoder = bundle.spec, bundle.text_encoder
    return Info(
        model_id=bundle.name,
        model_sha=spec.files[GRAPHS[session.precision]],
        model_dtype={"fp32": "float32", "fp16": "float16", "int8": "int8"}[session.precision],
        served_model_name=bundle.name,
        model_type={"embedding": {"pooling": spec.read_out}},
        max_concurrent_requests=settings.max_requests,
        max_input_length=spec.max_tokens,
        max_batch_tokens=embedder.max_batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=settings.max_inputs,
        auto_truncate=settings.truncate,
        tokenization_workers=embedder.tokenizer_threads,
        version=_version(),
        sha=None,
        docker_label=None,
        dimension=spec.dimension,
        provider=session.provider,
        threads=session.threads,
        template=TemplateInfo(
            text=spec.template,
            read_out=spec.read_out,
            template_tokens=encoder.template_tokens,
            text_tokens=encoder.text_tokens,
            final_period=spec.final_period,
            denoising=spec.denoising,
        ),
    )
