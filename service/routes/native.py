"""text-embeddings-inference's own routes: POST /embed, /similarity and /, which takes either."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Body, Depends, Request, Response

from service.body import JSONRoute
from service.embedder import Embedder, Embeddings
from service.errors import Empty, ErrorBody, Invalid
from service.routes.schemas import AnyRequest, EmbedRequest, Options, SimilarityRequest
from service.vectors import cosines, finish, to_json

__all__ = ["router"]

T = TypeVar("T")

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "No JSON, or no text in it"},
    413: {"model": ErrorBody, "description": "The body is larger than the limit"},
    415: {"model": ErrorBody, "description": "The content type is not JSON"},
    422: {"model": ErrorBody, "description": "A field is wrong, a text too long, or there are too many"},
    424: {"model": ErrorBody, "description": "The model failed on this input"},
    429: {"model": ErrorBody, "description": "The service is full; see Retry-After"},
    503: {"model": ErrorBody, "description": "The service is stopping"},
}

router = APIRouter(route_class=JSONRoute, responses=ERRORS, tags=["embedding"])


def get_embedder(request: Request) -> Embedder:
    embedder: Embedder = request.app.state.embedder
    return embedder


Served = Annotated[Embedder, Depends(get_embedder)]


@router.post("/embed", response_model=list[list[float]], summary="A vector for each text")
async def embed(body: EmbedRequest, request: Request, embedder: Served) -> Response:
    return await _unless_gone(request, _embed(body, request, embedder))


@router.post("/similarity", response_model=list[float], summary="The cosine of one text with each of others")
async def similarity(body: SimilarityRequest, request: Request, embedder: Served) -> Response:
    return await _unless_gone(request, _similarity(body, request, embedder))


@router.post("/", response_model=list[list[float]] | list[float], summary="/embed or /similarity, by the inputs' shape")
async def either(body: Annotated[AnyRequest, Body()], request: Request, embedder: Served) -> Response:
    if isinstance(body, SimilarityRequest):
        return await _unless_gone(request, _similarity(body, request, embedder))
    return await _unless_gone(request, _embed(body, request, embedder))


async def _embed(body: EmbedRequest, request: Request, embedder: Embedder) -> Response:
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts:
        raise Empty("inputs is an empty list; send at least one text")
    if body.dimensions is not None and body.dimensions > embedder.bundle.spec.dimension:
        raise Invalid(
            f"dimensions is {body.dimensions}; the model has {embedder.bundle.spec.dimension}: ask for that or fewer"
        )
    found = await _vectors(texts, body, request, embedder)
    content = await embedder.work(
        lambda: to_json(finish(found.vectors, normalize=body.normalize, dimensions=body.dimensions))
    )
    return Response(content, media_type="application/json")


async def _similarity(body: SimilarityRequest, request: Request, embedder: Embedder) -> Response:
    if not body.inputs.sentences:
        raise Empty("inputs.sentences is an empty list; send at least one text")
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    found = await _vectors(texts, body.parameters or Options(), request, embedder)
    content = await embedder.work(lambda: orjson.dumps(cosines(found.vectors)))
    return Response(content, media_type="application/json")


async def _vectors(texts: Sequence[str], options: Options, request: Request, embedder: Embedder) -> Embeddings:
    default: bool = request.app.state.settings.truncate
    truncate = default if options.truncate is None else options.truncate
    return await embedder.embed(texts, truncate=truncate, direction=options.direction)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Do the work, or cancel it as soon as the client has gone, so that its texts leave the queue."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            request.app.state.metrics.dropped()
            return Response(status_code=499)  # nobody reads it
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
