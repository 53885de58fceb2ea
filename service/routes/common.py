"""What the routes share: the model a request names, its inputs, its deadline, and what its answer says of the work."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from time import perf_counter, time_ns
from typing import Annotated, Any

from fastapi import Path, Request, Response

from encoding.errors import TextError
from encoding.text import Direction
from service.embedder import Embedder, Embeddings, Inputs
from service.errors import BackendFailed, Empty, ErrorBody, Invalid, Late
from service.metrics import GONE
from service.models import Models
from service.settings import Settings

__all__ = ["ERRORS", "attend", "check_dimensions", "embed", "listed", "of_model", "pick", "report"]

SWITCH = "If they are not this model's own, send texts; LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)"
FOREIGN = (
    "token ids are not taken, for those of another model cannot be told from this one's and would give wrong vectors "
    f"in silence. {SWITCH}. If they are, start the service with --token-ids"
)

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "No JSON, or no text in it"},
    401: {"model": ErrorBody, "description": "A key is needed, and none that is known was sent"},
    404: {"model": ErrorBody, "description": "No model of that name is served"},
    408: {"model": ErrorBody, "description": "The request did not come in time"},
    413: {"model": ErrorBody, "description": "The body is larger than the limit"},
    415: {"model": ErrorBody, "description": "The content type is not JSON"},
    422: {"model": ErrorBody, "description": "A field is wrong, a text too long, or there are too many"},
    424: {"model": ErrorBody, "description": "The model failed on this input"},
    429: {"model": ErrorBody, "description": "The service is full; see Retry-After"},
    503: {"model": ErrorBody, "description": "The service is stopping"},
    504: {"model": ErrorBody, "description": "The request was not answered in the time it had"},
}


def of_model(model: Annotated[str, Path(description="Name of a model, as /v1/models lists it")]) -> None:
    """Declare the path's model; `pick` reads it."""


def pick(request: Request, *names: str | None) -> Embedder:
    """The model that the path or the body names, else the default; its name is left for the log's line.

    Raises ModelNotFound, and Invalid where two are named.
    """
    models: Models = request.app.state.models
    asked = list(dict.fromkeys(filter(None, (request.path_params.get("model"), *names))))
    if len(asked) > 1:
        raise Invalid(f"two models are named, {asked[0]!r:.200} and {asked[1]!r:.200}; name one of them")
    found = models.get(asked[0] if asked else None)
    request.scope["state"]["model"] = found.name
    return found


def listed(inputs: str | list[str] | list[int] | list[list[int]], request: Request) -> Inputs:
    """One input as a list of one. Raises Empty, and Invalid for token ids where the setting does not allow them."""
    if isinstance(inputs, str):
        return [inputs]
    if not inputs:
        raise Empty("the input is an empty list; send at least one text")
    if isinstance(inputs[0], str):
        return inputs
    settings: Settings = request.app.state.settings
    if not settings.token_ids:
        raise Invalid(FOREIGN)
    return [inputs] if isinstance(inputs[0], int) else inputs


def check_dimensions(dimensions: int | None, embedder: Embedder) -> None:
    """Raise Invalid where more are asked for than there are."""
    if dimensions is not None and dimensions > embedder.bundle.spec.dimension:
        raise Invalid(
            f"dimensions is {dimensions}; the model has {embedder.bundle.spec.dimension}: ask for that or fewer"
        )


async def embed(
    inputs: Inputs,
    request: Request,
    embedder: Embedder,
    truncate: bool | None = None,
    direction: Direction = "right",
    name: Callable[[int], str] = "text {}".format,
) -> Embeddings:
    """Embed for the client that sent this request; how much it was is left for the log's line.

    `name` gives what an error calls the input at a place: the field that the client sent.
    """
    settings: Settings = request.app.state.settings
    state = request.scope["state"]
    state["texts"] = len(inputs)
    truncate = settings.truncate if truncate is None else truncate
    begun = time_ns()
    try:
        found = await embedder.embed(inputs, truncate=truncate, direction=direction, client=state["client"])
    except (TextError, BackendFailed) as error:
        message = str(error)
        if error.position is not None:
            message = message.replace(f"text {error.position}", name(error.position), 1)
        if type(error) is TextError and not isinstance(inputs[0], str):
            message = f"{message}. {SWITCH}"
        raise type(error)(message, position=error.position) from error
    state["tokens"] = found.tokens
    request.app.state.tracing.stages(
        begun, found.timing._asdict(), model=embedder.name, texts=len(inputs), tokens=found.tokens
    )
    return found


def report(found: Embeddings, request: Request, embedder: Embedder) -> dict[str, str]:
    """text-embeddings-inference's headers, in whole milliseconds, and the same by the standard Server-Timing.

    A wait and a batch are the mean of the request's texts; compute is tokenising and the graph, total all until now.
    """
    total = perf_counter() - request.scope["state"]["started"]
    parts = {**found.timing._asdict(), "total": total}
    ms = {name: 1000 * seconds for name, seconds in parts.items()}
    return {
        "x-compute-type": embedder.session.provider,
        "x-compute-time": f"{ms['tokenize'] + ms['inference']:.0f}",
        "x-compute-characters": str(found.characters),
        "x-compute-tokens": str(found.tokens),
        "x-total-time": f"{ms['total']:.0f}",
        "x-tokenization-time": f"{ms['tokenize']:.0f}",
        "x-queue-time": f"{ms['queue']:.0f}",
        "x-inference-time": f"{ms['inference']:.0f}",
        "server-timing": ", ".join(f"{name};dur={value:.2f}" for name, value in ms.items()),
    }


async def attend(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Do the work; cancel it when the client has gone or its time is over, so that its texts leave the queue.

    Its time began with the request's head: what the body took to come is gone. Raises Late.
    """
    try:
        seconds = _deadline(request)
    except Invalid:
        work.close()
        raise
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    left = seconds - (perf_counter() - request.scope["state"]["started"])
    try:
        await asyncio.wait({working, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if gone.done():
            request.app.state.metrics.dropped()
            return Response(status_code=GONE)
        raise Late(
            f"the request was not answered in {seconds:g} s, the time it had; send fewer texts, or send it later"
        )
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def _deadline(request: Request) -> float:
    """Seconds that a request has: the setting's, or fewer if the client says so in `x-request-timeout`."""
    settings: Settings = request.app.state.settings
    asked = request.headers.get("x-request-timeout")
    if asked is None:
        return settings.request_seconds
    try:
        seconds = float(asked)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise Invalid(f"the header x-request-timeout is {asked!r:.50}; write seconds, more than 0")
    return min(seconds, settings.request_seconds)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
