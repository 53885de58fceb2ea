"""Cohere's route: POST /v2/embed. The rows always have length 1. Images are refused, unknown fields ignored.

`input_type` chooses the model's template of that name: search_query is `query`, search_document is `document`. A model
without such a template uses its own.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import orjson
from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from cloze.encoding.bundle import SEARCH_NAMES
from cloze.service.errors import EmptyInput, ValidationFailed
from cloze.service.http.embed import check_dimensions, embed
from cloze.service.http.errors import documented
from cloze.service.http.request import Context, JSONRoute, TextList, lease
from cloze.service.http.response import respond
from cloze.service.http.schemas import EncodingOptions
from cloze.service.inference.model import Embeddings, Part
from cloze.service.inference.vectors import finish, to_json
from cloze.service.routes import COHERE

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
InputType = Literal["search_document", "search_query", "classification", "clustering", "image"]
TEMPLATES: Final[dict[InputType, str]] = dict(zip(("search_query", "search_document"), SEARCH_NAMES, strict=True))

router = APIRouter(route_class=JSONRoute, responses=documented(shape="cohere"), tags=["cohere"])


class Content(BaseModel):
    """One part of an input."""

    type: str
    text: str | None = None


class Input(BaseModel):
    """A text in parts, which are joined by spaces."""

    content: Annotated[list[Content], Field(fail_fast=True)]


class CohereRequest(BaseModel):
    """Texts to embed, as vectors of one or more types."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        json_schema_extra={
            "example": {"model": "cloze-mini", "texts": ["A man plays a guitar."], "input_type": "search_document"}
        },
    )

    model: str | None = None
    texts: TextList | None = None
    inputs: Annotated[list[Input], Field(fail_fast=True)] | None = None
    images: list[Any] | None = None
    input_type: InputType | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1, fail_fast=True)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tokens of a text; `truncate` says whether a longer one is truncated or rejected",
    )
    output_dimension: int | None = Field(
        None, ge=1, description="Keep only this many leading dimensions, before normalising"
    )


class Meta(BaseModel):
    """The version of the API, and the number of tokens."""

    api_version: dict[str, str]
    billed_units: dict[str, int]


class CohereResponse(BaseModel):
    """The embeddings by type, in the order of the texts."""

    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    id: str
    embeddings: dict[EmbeddingType, list[list[float]] | list[list[int]] | list[str]]
    texts: list[str]
    meta: Meta


@router.post(COHERE.path, response_model=CohereResponse, summary="A vector for each text")
async def cohere_embed(body: CohereRequest, context: Context) -> Response:
    with lease(context, body.model) as model:
        check_dimensions(body.output_dimension, model, "output_dimension")
        texts, field = _texts(body)
        template = TEMPLATES.get(body.input_type) if body.input_type else None
        options = EncodingOptions(
            truncate=body.truncate and body.truncate != "NONE",
            truncation_direction="left" if body.truncate == "START" else "right",
        )
        named = template if template in model.bundle.named else context.record.template
        part = Part(texts, named, body.max_tokens)
        embeddings = await embed([part], context, model, options, lambda index: f"{field}[{index}]")
        return await respond(lambda: _as_json(body, texts, embeddings, context.record.id), context, model, embeddings)


def _as_json(body: CohereRequest, texts: list[str], embeddings: Embeddings, identity: str) -> Iterator[bytes]:
    vectors = finish(embeddings.vectors, normalize=True, dimensions=body.output_dimension)
    yield b'{"response_type":"embeddings_by_type","id":%b,"embeddings":{' % orjson.dumps(identity)
    types: list[EmbeddingType] = body.embedding_types or ["float"]
    for index, embedding_type in enumerate(dict.fromkeys(types)):
        yield (b',"%b":' if index else b'"%b":') % embedding_type.encode()
        yield from to_json(vectors, embedding_type)
    yield b'},"texts":'
    yield orjson.dumps(texts)
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": embeddings.tokens}}
    yield b',"meta":%b}' % orjson.dumps(meta)


def _texts(body: CohereRequest) -> tuple[list[str], str]:
    """Return the texts, and the field that contained them. Raises EmptyInput and ValidationFailed."""
    if body.images or body.input_type == "image":
        raise ValidationFailed("images cannot be embedded; send texts")
    if body.texts and body.inputs:
        raise ValidationFailed("texts and inputs are both given; send one of them")
    if body.texts:
        return body.texts, "texts"
    texts = []
    for index, entry in enumerate(body.inputs or []):
        if any(part.type != "text" or part.text is None for part in entry.content):
            raise ValidationFailed(f"inputs[{index}] has content that is not text; send texts")
        texts.append(" ".join(part.text or "" for part in entry.content))
    if not texts:
        raise EmptyInput("texts is missing or empty; send at least one text")
    return texts, "inputs"
