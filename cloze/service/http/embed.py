"""POST /embed, and the embedding step that every route with texts shares."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from time import time_ns
from typing import Any, Final, cast

from fastapi import APIRouter, Response

from cloze.encoding.chunks import Chunk, chunked, least_tokens
from cloze.encoding.errors import TextError
from cloze.encoding.text import TextEncoder
from cloze.service.errors import ValidationFailed
from cloze.service.http.errors import documented
from cloze.service.http.request import SWITCH, Context, JSONRoute, RequestContext, as_list, lease, named_template
from cloze.service.http.response import BYTES, JSON, respond
from cloze.service.http.schemas import Chunking, ChunkRows, EmbedRequest, EncodingOptions, Rows
from cloze.service.inference.model import Embeddings, Inputs, Model, Part, slices
from cloze.service.inference.vectors import (
    Array,
    Format,
    Raw,
    chunk_means,
    finish,
    rows,
    to_bytes,
    to_json,
    with_commas,
)
from cloze.service.routes import EMBED

QUALITY: Final = re.compile(r";\s*q\s*=\s*([01](?:\.\d*)?)")

AS_BYTES: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "A vector for each text. If the Accept header prefers bytes: the rows one after the other, "
        "little-endian, with their type in x-embedding-type and their shape in x-embedding-shape",
        "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}},
    }
}

router = APIRouter(route_class=JSONRoute, responses=documented(), tags=["embedding"])


@router.post(EMBED.path, response_model=Rows | ChunkRows, responses=AS_BYTES, summary="A vector for each text")
async def embed_texts(body: EmbedRequest, context: Context) -> Response:
    in_format = to_bytes if _prefers_bytes(context.accept) else to_json
    with lease(context, body.model) as model:
        check_dimensions(body.dimensions, model)
        inputs = as_list(body.inputs, token_ids=context.services.settings.token_ids)
        if body.chunk is not None:
            return await embed_chunks(body, body.chunk, inputs, context, model, in_format)
        embeddings = await embed([Part(inputs, named_template(context, model, body.prompt_name))], context, model, body)

        def write() -> Iterable[bytes] | Raw:
            vectors = finish(embeddings.vectors, normalize=body.normalize, dimensions=body.dimensions)
            return in_format(vectors, body.encoding_format or "float")

        return await respond(write, context, model, embeddings)


async def embed_chunks(
    body: EmbedRequest,
    chunking: Chunking,
    inputs: Inputs,
    context: RequestContext,
    model: Model,
    in_format: Callable[[Array, Format], Iterable[bytes] | Raw],
) -> Response:
    """Respond with a JSON list of chunks for each text, or with the mean of its chunks' vectors in the format."""
    if not isinstance(inputs[0], str):
        raise ValidationFailed("token ids cannot be cut into chunks; send texts")
    texts, template = cast(Sequence[str], inputs), named_template(context, model, body.prompt_name)
    encoder = model.text_encoders[template]
    tokens = _chunk_tokens(chunking, encoder)
    model.check_lengths(texts)
    chunks = await _cut(texts, encoder, tokens, chunking.overlap, context)
    owners = [owner for owner, text_chunks in enumerate(chunks) for _ in text_chunks]
    parts = [
        texts[owner][chunk.start : chunk.stop] for owner, text_chunks in enumerate(chunks) for chunk in text_chunks
    ]
    embeddings = await embed([Part(parts, template)], context, model, body, lambda index: f"text {owners[index]}")

    def write() -> Iterable[bytes] | Raw:
        vectors = embeddings.vectors
        encoding_format = body.encoding_format or "float"
        if chunking.mean:
            vectors = chunk_means(vectors, owners, list(map(len, parts)))
        vectors = finish(vectors, normalize=body.normalize, dimensions=body.dimensions)
        return (
            in_format(vectors, encoding_format)
            if chunking.mean
            else _chunks_json(chunks, rows(vectors, encoding_format))
        )

    return await respond(write, context, model, embeddings)


async def _cut(
    texts: Sequence[str], encoder: TextEncoder, tokens: int, overlap: int, context: RequestContext
) -> list[list[Chunk]]:
    """Cut the texts, some at a time in a worker thread. Raises ValidationFailed if there are too many chunks."""
    limit = context.services.settings.max_client_batch_size

    def cut(part: Sequence[str], room: int, first: int) -> list[list[Chunk]]:
        part_chunks = []
        for position, text in enumerate(part, first):
            try:
                part_chunks.append(list(islice(chunked(encoder, text, tokens, overlap), room + 1)))
            except TextError as error:
                error.at(position)
                raise
            room -= len(part_chunks[-1])
            if room < 0:
                raise ValidationFailed(
                    f"the texts make more than {limit} chunks, the limit of a request; send fewer texts, or raise "
                    "chunk.tokens"
                )
        return part_chunks

    workers, chunks = context.services.executors.workers, list[list[Chunk]]()
    for part in slices([Part(texts)]):
        inputs, room = cast(Sequence[str], part.inputs), limit - sum(map(len, chunks))
        task, size = partial(cut, inputs, room, len(chunks)), sum(map(len, inputs))
        chunks += await workers.run(context.record.client, task, size)
    return chunks


def _chunk_tokens(chunking: Chunking, encoder: TextEncoder) -> int:
    """Return the maximum number of tokens of a chunk. Raises ValidationFailed."""
    tokens = encoder.text_tokens if chunking.tokens is None else chunking.tokens
    if tokens > encoder.text_tokens:
        raise ValidationFailed(f"chunk.tokens is {tokens}; at most {encoder.text_tokens} fit into the template")
    if tokens < (least := least_tokens(encoder)):
        raise ValidationFailed(f"chunk.tokens is {tokens}; at least {least} are needed, a final period included")
    if chunking.overlap > tokens // 2:
        raise ValidationFailed(f"chunk.overlap is {chunking.overlap}; at most half of the {tokens} tokens is allowed")
    return tokens


def _chunks_json(chunks: Sequence[Sequence[Chunk]], vectors: Iterator[bytes]) -> Iterator[bytes]:
    for index, text_chunks in enumerate(chunks):
        yield b",[" if index else b"[["
        yield from with_commas(
            b'{"start":%d,"stop":%d,"embedding":%b}' % (*chunk, next(vectors)) for chunk in text_chunks
        )
        yield b"]"
    yield b"]"


def check_dimensions(dimensions: int | None, model: Model, field: str = "dimensions") -> None:
    """Raise ValidationFailed if the body's `field` asks for more dimensions than the model has."""
    limit = model.dimension
    if dimensions is not None and dimensions > limit:
        raise ValidationFailed(f"{field} is {dimensions}; the model has {limit}: ask for that or fewer", field)


async def embed(
    parts: Sequence[Part],
    context: RequestContext,
    model: Model,
    options: EncodingOptions,
    field: Callable[[int], str] | None = None,
) -> Embeddings:
    """Embed for the client of this request, and record the numbers of texts and tokens.

    `field` returns the name that an error gives the input at an index: the field of the body that the client sent.
    """
    services, record = context.services, context.record
    record.texts = sum(len(part.inputs) for part in parts)
    truncate = services.settings.auto_truncate if options.truncate is None else options.truncate
    begun = time_ns()
    try:
        embeddings = await model.embed(*parts, truncate=truncate, direction=options.direction, client=record.client)
    except TextError as error:
        if type(error) is TextError and not isinstance(parts[0].inputs[0], str):  # token ids, perhaps of another model
            error = TextError(f"{error.args[0]}. {SWITCH}", position=error.position)
        if field is not None and error.position is not None:
            error.subject = field(error.position)
        raise error from error.__cause__
    record.tokens = embeddings.tokens
    if services.tracing.provider is not None:
        timing = embeddings.timing._asdict()
        services.tracing.stages(begun, timing, model=model.name, texts=record.texts, tokens=embeddings.tokens)
    return embeddings


def _prefers_bytes(accept: str) -> bool:
    """Whether an Accept header names bytes, and JSON not at all or with a lower quality (RFC 9110, 12.5.1)."""
    if BYTES not in accept.lower():
        return False
    qualities = {}
    for media_range in accept.lower().split(","):
        quality = QUALITY.search(media_range)
        qualities[media_range.partition(";")[0].strip()] = float(quality[1]) if quality else 1.0
    json = next((qualities[name] for name in (JSON, "application/*", "*/*") if name in qualities), 0.0)
    return qualities.get(BYTES, 0.0) > json
