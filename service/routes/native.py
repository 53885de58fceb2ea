"""text-embeddings-inference's own routes, and search: texts in; vectors, cosines, ranks or tokens out."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Final

import numpy as np
import orjson
from fastapi import APIRouter, Body, Request, Response

from service.body import JSONRoute
from service.embedder import Embedder, Embeddings
from service.errors import Empty, Invalid, too_many
from service.routes.common import ERRORS, attend, check_dimensions, embed, listed, pick, report
from service.routes.schemas import (
    AnyRequest,
    DecodeRequest,
    EmbedRequest,
    Found,
    Lists,
    Options,
    Pairs,
    Rows,
    SearchRequest,
    Sentences,
    SimilarityRequest,
    TokenInfo,
    TokenizeRequest,
)
from service.vectors import SMALL, Array, Vectors, cosine_matrix, cosines, finish, pair_cosines, to_bytes, to_json

__all__ = ["CELLS", "CHARACTERS", "IDS", "roots", "router"]

Cosines = list[float] | list[list[float]]

BYTES: Final = "application/octet-stream"
JSON: Final = "application/json"
QUALITY: Final = re.compile(r";\s*q\s*=\s*([01](?:\.\d*)?)")
CELLS: Final = 2**22  # of a matrix; 8 192 texts with as many would be a gigabyte of JSON
CHARACTERS: Final = 2**18  # shown token by token, for a token's JSON is a hundred times its text
IDS: Final = 2**18  # read as text; a body of eight million would keep a worker for seconds

AS_BYTES: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "A vector for each text; as bytes where the Accept header asks for them, the rows then follow "
        "each other, little-endian, of the type x-embedding-type and the shape x-embedding-shape",
        "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}},
    }
}

router = APIRouter(route_class=JSONRoute, responses=ERRORS, tags=["embedding"])
roots = APIRouter(route_class=JSONRoute, responses=ERRORS, tags=["embedding"])


@router.post("/embed", response_model=Rows, responses=AS_BYTES, summary="A vector for each text")
async def embed_texts(body: EmbedRequest, request: Request) -> Response:
    return await attend(request, _embed(body, request))


@router.post("/similarity", response_model=Cosines, summary="Cosines: one with many, pairs, or two lists")
async def similarity(body: SimilarityRequest, request: Request) -> Response:
    return await attend(request, _similarity(body, request))


@roots.post(
    "/", response_model=Rows | Cosines, responses=AS_BYTES, summary="/embed or /similarity, by the inputs' shape"
)
async def either(body: Annotated[AnyRequest, Body()], request: Request) -> Response:
    work = _similarity(body, request) if isinstance(body, SimilarityRequest) else _embed(body, request)
    return await attend(request, work)


@roots.post("/models/{model}", response_model=Rows | Cosines, responses=AS_BYTES, summary="The same, by one model")
async def either_of_model(model: str, body: Annotated[AnyRequest, Body()], request: Request) -> Response:
    return await either(body, request)


@router.post(
    "/search", response_model=list[Found], response_model_exclude_none=True, summary="Texts, ranked for a query"
)
async def search(body: SearchRequest, request: Request) -> Response:
    return await attend(request, _search(body, request))


@router.post("/tokenize", response_model=list[list[TokenInfo]], summary="What the model sees, and what is cut")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    return await attend(request, _tokenize(body, request))


@router.post("/decode", response_model=list[str], summary="Token ids, as text")
async def decode(body: DecodeRequest, request: Request) -> Response:
    return await attend(request, _decode(body, request))


async def _embed(body: EmbedRequest, request: Request) -> Response:
    embedder = pick(request, body.model)
    check_dimensions(body.dimensions, embedder)
    found = await embed(listed(body.inputs, request), request, embedder, body.truncate, body.direction)
    format = body.encoding_format or "float"

    def vectors() -> Vectors:
        return finish(found.vectors, normalize=body.normalize, dimensions=body.dimensions)

    if not _prefers_bytes(request.headers.get("accept", "")):
        return await _answer(lambda: to_json(vectors(), format), embedder, request, found)
    raw = await embedder.device.work(lambda: to_bytes(vectors(), format), small=found.numbers <= SMALL)
    told = {"x-embedding-type": raw.dtype, "x-embedding-shape": "{},{}".format(*raw.shape)}
    return Response(raw.content, media_type=BYTES, headers=report(found, request, embedder) | told)


def _prefers_bytes(accept: str) -> bool:
    """Whether an Accept header names bytes, and JSON, if at all, with a lower quality (RFC 9110, 12.5.1)."""
    qualities = {}
    for each in accept.lower().split(","):
        quality = QUALITY.search(each)
        qualities[each.partition(";")[0].strip()] = float(quality[1]) if quality else 1.0
    return qualities.get(BYTES, 0.0) > qualities.get(JSON, 0.0)


async def _similarity(body: SimilarityRequest, request: Request) -> Response:
    options = body.parameters or Options()
    texts, name, compare = _comparison(body.inputs)
    embedder = pick(request, body.model, options.model)
    found = await embed(texts, request, embedder, options.truncate, options.direction, name)
    return await _answer(lambda: to_json(compare(found.vectors)), embedder, request, found)


def _comparison(
    inputs: Sentences | Pairs | Lists,
) -> tuple[list[str], Callable[[int], str], Callable[[Vectors], Array]]:
    """The texts to embed, where in the body each of them stands, and what to make of their vectors.

    Raises Empty, Invalid.
    """
    match inputs:
        case Pairs(pairs=[_, *_] as pairs):
            return (
                [text for pair in pairs for text in pair],
                lambda place: f"inputs.pairs[{place // 2}][{place % 2}]",
                lambda vectors: pair_cosines(vectors[::2], vectors[1::2]),
            )
        case Lists(source_sentences=[_, *_] as sources, sentences=[_, *_] as sentences):
            rows, cells = len(sources), len(sources) * len(sentences)
            if cells > CELLS:
                raise Invalid(f"the two lists make {cells} cosines; at most {CELLS} are allowed: send shorter lists")
            return (
                [*sources, *sentences],
                lambda place: (
                    f"inputs.source_sentences[{place}]" if place < rows else f"inputs.sentences[{place - rows}]"
                ),
                lambda vectors: cosine_matrix(vectors[:rows], vectors[rows:]),
            )
        case Sentences(sentences=[_, *_] as sentences):
            return (
                [inputs.source_sentence, *sentences],
                lambda place: f"inputs.sentences[{place - 1}]" if place else "inputs.source_sentence",
                cosines,
            )
    raise Empty("a list in inputs is empty; send at least one text")


async def _search(body: SearchRequest, request: Request) -> Response:
    if not body.texts:
        raise Empty("texts is an empty list; send at least one text")
    embedder = pick(request, body.model)
    found = await embed(
        [body.query, *body.texts],
        request,
        embedder,
        body.truncate,
        body.direction,
        lambda place: f"texts[{place - 1}]" if place else "query",
    )

    def rank() -> bytes:
        scores = cosines(found.vectors)
        best = np.argsort(-scores, kind="stable")[: body.top_k]  # of equals the first comes first
        ranked: list[dict[str, Any]] = [{"index": int(place), "score": float(scores[place])} for place in best]
        if body.return_text:
            ranked = [{**each, "text": body.texts[each["index"]]} for each in ranked]
        return orjson.dumps(ranked)

    return await _answer(rank, embedder, request, found)


async def _tokenize(body: TokenizeRequest, request: Request) -> Response:
    embedder = pick(request, body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts:
        raise Empty("inputs is an empty list; send at least one text")
    embedder.check_inputs(texts)
    if (characters := sum(map(len, texts))) > CHARACTERS:
        raise Invalid(f"{characters} characters in one request; at most {CHARACTERS} are shown as tokens: split it")
    whole = body.add_special_tokens

    def explain() -> bytes:
        explained = (embedder.bundle.text_encoder.explain(text, direction=body.direction) for text in texts)
        return orjson.dumps([[t._asdict() for t in tokens if whole or not t.template] for tokens in explained])

    return await _answer(explain, embedder, request)


async def _decode(body: DecodeRequest, request: Request) -> Response:
    embedder = pick(request, body.model)
    if not body.ids:
        raise Empty("ids is an empty list; send at least one id")
    sequences = [ids for ids in body.ids if isinstance(ids, list)] or [[i for i in body.ids if isinstance(i, int)]]
    embedder.check_inputs(sequences)
    if (ids := sum(map(len, sequences))) > IDS:
        raise too_many(ids, "token ids", IDS)

    def read() -> bytes:
        encoder = embedder.bundle.text_encoder
        return orjson.dumps([encoder.decode(ids, body.skip_special_tokens) for ids in sequences])

    return await _answer(read, embedder, request)


async def _answer(
    write: Callable[[], bytes], embedder: Embedder, request: Request, found: Embeddings | None = None
) -> Response:
    """What is written, with a report of the vectors it is made of; the report counts the writing too."""
    content = await embedder.device.work(write, small=found is not None and found.numbers <= SMALL)
    headers = report(found, request, embedder) if found else None
    return Response(content, media_type=JSON, headers=headers)
