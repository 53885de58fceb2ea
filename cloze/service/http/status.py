"""The routes for operators: GET /health and its parts, /info, /metrics, and POST /admin/reload."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cloze.encoding.bundle import DTYPES
from cloze.encoding.errors import ClozeError
from cloze.service import VERSION
from cloze.service.errors import ReloadFailed
from cloze.service.http.compare import MAX_SIMILARITIES
from cloze.service.http.errors import documented
from cloze.service.http.explain import most_words
from cloze.service.http.predict import MAX_PREDICTIONS
from cloze.service.http.request import MAX_DECODE_IDS, Context, lease
from cloze.service.http.schemas import CalibrationInfo, HeadInfo, Info, TemplateInfo
from cloze.service.http.tokens import MAX_TOKENIZE_CHARACTERS
from cloze.service.inference.model import MAX_TEXT_CHARACTERS, Model
from cloze.service.inference.models import Reloaded
from cloze.service.routes import HEALTH, INFO, LIVE, METRICS, READY, RELOAD, STARTUP

probes = APIRouter(tags=["status"], default_response_class=Response)  # these need no key
router = APIRouter(tags=["status"], responses=documented(401, 404))
admin = APIRouter(tags=["admin"], responses=documented(401, 409))  # needs an admin key; if none is set, it is closed


@probes.head(HEALTH.path, include_in_schema=False)
@probes.get(HEALTH.path, responses=documented(503), summary="Whether every model works")
@probes.head(READY.path, include_in_schema=False)
@probes.get(READY.path, responses=documented(503), summary="The same as /health")
async def ready(context: Context) -> Response:
    """Return an empty response if every model works. A model whose last batch failed is tried again.

    A busy service is ready. Under /models/NAME, only that model is checked.
    """
    with lease(context) as model:
        await context.services.health.check(model if context.model else None)
    return Response()


@probes.head(LIVE.path, include_in_schema=False)
@probes.get(LIVE.path, summary="Whether the process responds")
@probes.head(STARTUP.path, include_in_schema=False)
@probes.get(STARTUP.path, summary="Whether every model is loaded and warmed up")
async def live() -> Response:
    """Return an empty response. The port is closed until every model is loaded and warmed up."""
    return Response()


@router.head(INFO.path, include_in_schema=False)
@router.get(INFO.path, summary="The default model, its template and limits")
async def info(context: Context) -> Info:
    """Under /models/NAME, describe that model. An alias is described with the template that it chooses."""
    services = context.services
    with lease(context) as model:
        settings, models, threads = services.settings, services.models, services.executors.threads
        spec, session, template = model.bundle.spec, model.session, context.record.template
        encoder = model.text_encoders[template]
        return Info(
            model_id=model.name,
            model_sha=model.graph,
            bridge_sha=model.bridge.sha256 if model.bridge else None,
            model_dtype=DTYPES[session.precision],
            served_model_name=model.name,
            model_type={"embedding": {"pooling": spec.pooling}},
            max_concurrent_requests=settings.max_concurrent_requests,
            max_input_length=spec.max_tokens,
            max_batch_tokens=model.max_batch_tokens,
            max_client_batch_size=settings.max_client_batch_size,
            auto_truncate=settings.auto_truncate,
            tokenization_workers=services.executors.workers.threads,
            version=VERSION,
            dimension=model.dimension,
            provider=session.provider,
            threads=threads.batches * threads.per_batch,
            threads_per_batch=threads.per_batch,
            token_ids=settings.token_ids,
            vocabulary_size=encoder.vocabulary_size,
            max_tokens_in_flight=settings.max_tokens_in_flight,
            max_bytes_in_flight=settings.max_bytes_in_flight,
            max_text_characters=MAX_TEXT_CHARACTERS,
            max_body_bytes=settings.payload_limit,
            max_similarities=MAX_SIMILARITIES,
            max_explained_words=most_words(settings),
            max_predictions=MAX_PREDICTIONS,
            max_tokenize_characters=MAX_TOKENIZE_CHARACTERS,
            max_decode_ids=MAX_DECODE_IDS,
            template=TemplateInfo(
                text=spec.templates[template] if template else spec.template,
                pooling=spec.pooling,
                template_tokens=encoder.template_tokens,
                text_tokens=encoder.text_tokens,
                final_period=spec.final_period,
                denoising=spec.denoising,
            ),
            templates=spec.templates,
            calibration=_calibration(model) if template is None else None,  # learnt with its own template, like heads
            heads={
                name: HeadInfo(**head.model_dump(include=set(HeadInfo.model_fields)))
                for name, head in (model.heads.items() if template is None else ())
            },
            embedding_space=model.space,
            models=list(models.served),
            default_model=models.default,
            aliases=models.aliases,
        )


def _calibration(model: Model) -> CalibrationInfo | None:
    calibration, precision = model.calibration, model.session.precision
    if calibration is None or precision not in calibration.curves:
        return None
    facts = calibration.model_dump(include={"meaning", "lowest", "highest", "source", "pairs"})
    curve = calibration.curves[precision]
    return CalibrationInfo(**facts, error=curve.error, thresholds=curve.thresholds)


@probes.head(METRICS.path, include_in_schema=False)
@probes.get(METRICS.path, responses={200: {"content": {"text/plain": {}}}})
async def metrics(context: Context) -> Response:
    return Response(context.services.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@admin.post(RELOAD.path, summary="Reload the folder of bundles")
async def reload(context: Context) -> Reloaded:
    """Load, check and warm up new and changed bundles beside the served ones, then swap in all of them or none."""
    try:
        return await context.services.models.reload()
    except ClozeError as error:
        raise ReloadFailed(f"the reload failed, and nothing has changed: {error}") from error
