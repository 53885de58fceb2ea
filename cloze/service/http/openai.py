"""OpenAI's routes: POST /v1/embeddings and GET /v1/models. The rows always have length 1, as OpenAI's have.

Unknown fields, such as `user`, are ignored.
"""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

import orjson
from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict, Field

from cloze.service.errors import ModelNotFound
from cloze.service.http.embed import check_dimensions, embed
from cloze.service.http.errors import documented
from cloze.service.http.request import Context, Inputs, JSONRoute, as_list, lease, named_template
from cloze.service.http.response import respond
from cloze.service.http.schemas import EncodingOptions
from cloze.service.inference.model import Model, Part
from cloze.service.inference.vectors import Format, finish, rows, with_commas
from cloze.service.routes import MODEL, MODELS, OPENAI


class EmbeddingsRequest(EncodingOptions):
    """One or more texts to embed as vectors of length 1. OpenAI's client sends the other fields in `extra_body`."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": ["A man plays a guitar."]}})

    input: Inputs = Field(description="A text or a list of texts; or token ids, if the service accepts them")
    encoding_format: Format | None = Field(
        None,
        description="null or float: JSON numbers; base64: what OpenAI's clients request by default; the others as in "
        "/embed",
    )
    dimensions: int | None = Field(None, ge=1, description="Keep only this many leading dimensions, before normalising")


class Embedding(BaseModel):
    """The embedding of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[int] | str


class Usage(BaseModel):
    """Number of tokens in all inputs, templates included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """One embedding for each input, in order."""

    object: Literal["list"]
    id: str = Field(description="id of the request, as in the header x-request-id; some clients require one")
    data: list[Embedding]
    model: str
    usage: Usage


class ModelCard(BaseModel):
    """One model."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="when the bundle was written, in seconds since 1970")
    owned_by: Literal["cloze"] = "cloze"
    max_model_len: int = Field(
        description="maximum number of tokens of a sequence, template included; vLLM's name for it"
    )
    root: str = Field(description="the model's own name; `id` may be an alias")
    embedding_space: str = Field(
        description="digest of everything that determines a vector; also the header x-embedding-space"
    )
    template: str = Field(description="prompt template; [X] stands for the text, and the vector may be read at [MASK]")
    templates: dict[str, str] = Field(description="named templates, which `prompt_name` or an alias chooses")


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


ANY_MODEL: Final = MODEL.path.replace("}", ":path}")  # an alias may have slashes

router = APIRouter(tags=["openai"])
posts = APIRouter(route_class=JSONRoute, responses=documented(shape="openai"), tags=["openai"])


@posts.post(OPENAI.path, response_model=EmbeddingsResponse, summary="A vector for each text")
async def embeddings(body: EmbeddingsRequest, context: Context) -> Response:
    with lease(context, body.model) as model:
        check_dimensions(body.dimensions, model)
        inputs = as_list(body.input, token_ids=context.services.settings.token_ids)
        embedded = await embed([Part(inputs, named_template(context, model, body.prompt_name))], context, model, body)

        def as_json() -> Iterator[bytes]:
            """Write the parts in OpenAI's order, the rows one by one."""
            vectors = finish(embedded.vectors, normalize=True, dimensions=body.dimensions)
            yield b'{"object":"list","id":%b,"data":[' % orjson.dumps(context.record.id)
            yield from with_commas(
                b'{"object":"embedding","index":%d,"embedding":%b}' % (index, row)
                for index, row in enumerate(rows(vectors, body.encoding_format or "float"))
            )
            usage = orjson.dumps({"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens})
            yield b'],"model":%b,"usage":%b}' % (orjson.dumps(model.name), usage)

        return await respond(as_json, context, model, embedded)


@router.head(MODELS.path, include_in_schema=False)
@router.get(MODELS.path, responses=documented(401, shape="openai"), summary="The served models")
async def list_models(context: Context) -> ModelList:
    """List every model and its aliases. Under /models/NAME, only that model and its aliases."""
    models = context.services.models
    found = {name: models.find(name) for name in (*models.served, *models.aliases)}
    with lease(context) as leased:
        shown = [name for name, (model, _) in found.items() if model is leased or not context.model]
        return ModelList(data=[_card(name, *found[name]) for name in shown])


@router.head(ANY_MODEL, include_in_schema=False)
@router.get(ANY_MODEL, responses=documented(401, 404, shape="openai"), summary="One of the served models")
async def one_model(
    model: Annotated[str, Path(description="Name of a model, as listed by /v1/models")], context: Context
) -> ModelCard:
    if not model:
        raise ModelNotFound("the path ends in a slash and does not name a model; GET /v1/models lists the models")
    with lease(context, model) as leased:
        return _card(model, leased, context.record.template)


def _card(name: str, model: Model, template: str | None) -> ModelCard:
    spec = model.bundle.spec
    return ModelCard(
        id=name,
        created=model.bundle.created,
        root=model.name,
        embedding_space=model.space,
        max_model_len=spec.max_tokens,
        template=spec.template if template is None else spec.templates[template],
        templates=spec.templates,
    )
