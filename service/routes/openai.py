"""OpenAI's routes: POST /v1/embeddings, GET /v1/models; the same without /v1, as some clients are set up.

Under /models/NAME they are there for a client that takes no more than a URL, and asks /v1/embeddings below it.
The rows are always of length 1, as OpenAI's are. Unknown fields, `user` for one, are ignored.
"""

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service.body import JSONRoute
from service.embedder import Embedder
from service.models import Models
from service.routes.common import ERRORS, attend, check_dimensions, embed, listed, of_model, pick, report
from service.routes.inputs import Inputs
from service.routes.schemas import Options
from service.vectors import SMALL, Format, finish, rows

__all__ = ["router"]


class Fault(BaseModel):
    """What OpenAI's clients look for in an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class FaultBody(BaseModel):
    """Every answer that is no success."""

    error: Fault


class EmbeddingsRequest(Options):
    """One text or many, each to a vector of length 1; what is not OpenAI's goes by the client's `extra_body`."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": ["A man plays a guitar."]}})

    input: Inputs = Field(description="A text or a list of them; token ids only where the service allows them")
    encoding_format: Format | None = Field(
        None, description="null or float; base64, as OpenAI's clients ask for; the others as in /embed"
    )
    dimensions: int | None = Field(None, ge=1, description="Keep only the first dimensions, before normalising")


class Embedding(BaseModel):
    """One row."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[int] | str


class Usage(BaseModel):
    """Tokens that were run, the template's included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """One row for each input, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModelCard(BaseModel):
    """One model."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="seconds since 1970, when the bundle was written")
    owned_by: Literal["cloze"] = "cloze"


class ModelList(BaseModel):
    """Every model that is served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


FAULTS: dict[int | str, dict[str, Any]] = {
    500 if status == 424 else status: {**told, "model": FaultBody} for status, told in ERRORS.items()
}
Name = Annotated[str, Path(description="Name of a model, as /v1/models lists it")]

router = APIRouter(tags=["openai"], responses={401: FAULTS[401]})
posts = APIRouter(route_class=JSONRoute, responses=FAULTS)


@posts.post("/v1/embeddings", response_model=EmbeddingsResponse, summary="A vector for each text")
@posts.post("/embeddings", response_model=EmbeddingsResponse, summary="A vector for each text")
@posts.post(
    "/models/{model}/v1/embeddings",
    response_model=EmbeddingsResponse,
    dependencies=[Depends(of_model)],
    summary="The same, by one model",
)
async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
    return await attend(request, _embeddings(body, request))


@router.get("/v1/models", summary="What is served")
@router.get("/models", summary="What is served")
async def list_models(request: Request) -> ModelList:
    models: Models = request.app.state.models
    return ModelList(data=[_card(embedder) for embedder in models])


@router.get(
    "/models/{model}/v1/models",
    responses={404: FAULTS[404]},
    dependencies=[Depends(of_model)],
    summary="That model alone",
)
async def list_one_model(request: Request) -> ModelList:
    return ModelList(data=[_card(pick(request))])


@router.get("/v1/models/{model}", responses={404: FAULTS[404]}, summary="One of these")
@router.get("/models/{model}", responses={404: FAULTS[404]}, summary="One of these")
async def one_model(model: Name, request: Request) -> ModelCard:
    return _card(pick(request, model))


async def _embeddings(body: EmbeddingsRequest, request: Request) -> Response:
    embedder = pick(request, body.model)
    check_dimensions(body.dimensions, embedder)
    found = await embed(listed(body.input, request), request, embedder, body.truncate, body.direction)

    def write() -> bytes:
        """The parts as OpenAI orders them, rows written one by one."""
        vectors = finish(found.vectors, normalize=True, dimensions=body.dimensions)
        data = b",".join(
            b'{"object":"embedding","index":%d,"embedding":%b}' % (index, row)
            for index, row in enumerate(rows(vectors, body.encoding_format or "float"))
        )
        usage = orjson.dumps({"prompt_tokens": found.tokens, "total_tokens": found.tokens})
        return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (data, orjson.dumps(embedder.name), usage)

    content = await embedder.device.work(write, small=found.numbers <= SMALL)
    return Response(content, media_type="application/json", headers=report(found, request, embedder))


def _card(embedder: Embedder) -> ModelCard:
    return ModelCard(id=embedder.name, created=embedder.bundle.created)


router.include_router(posts)
