"""POST /similarity and POST /search: cosines between the texts of one request. POST / accepts /embed's body as well."""

from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import orjson
from fastapi import APIRouter, Body, Response

from cloze.encoding.bundle import SEARCH_NAMES
from cloze.encoding.calibration import CALIBRATION_FILE
from cloze.service.errors import EmptyInput, ValidationFailed
from cloze.service.http.embed import AS_BYTES, embed, embed_texts
from cloze.service.http.errors import documented
from cloze.service.http.request import Context, JSONRoute, lease, named_template
from cloze.service.http.response import respond
from cloze.service.http.schemas import (
    AnyRequest,
    ChunkRows,
    EncodingOptions,
    Found,
    Lists,
    Pairs,
    Rows,
    SearchRequest,
    Sentences,
    SimilarityRequest,
)
from cloze.service.inference.model import Model, Part
from cloze.service.inference.vectors import Array, Vectors, cosine_matrix, cosines, pair_cosines, to_json
from cloze.service.routes import ROOT, SEARCH, SIMILARITY

Cosines = list[float] | list[list[float]]

MAX_SIMILARITIES: Final = 2**22  # of one matrix: 8 192 × 8 192 cosines would be a gigabyte of JSON

router = APIRouter(route_class=JSONRoute, responses=documented(), tags=["embedding"])


class Layout(NamedTuple):
    """The texts of a comparison, the field of the body at each index, and what is computed from their vectors."""

    texts: list[str]
    field: Callable[[int], str]
    compare: Callable[[Vectors], Array]


@router.post(
    SIMILARITY.path, response_model=Cosines, summary="Cosines of one text with others, of pairs, or of two lists"
)
async def similarity(body: SimilarityRequest, context: Context) -> Response:
    options = body.parameters or EncodingOptions()
    layout = _layout(body.inputs)
    with lease(context, body.model, options.model) as model:
        parts = [Part(layout.texts, named_template(context, model, options.prompt_name))]
        meaning = _meaning(model, body.calibrated, parts)
        embeddings = await embed(parts, context, model, options, layout.field)
        return await respond(lambda: to_json(meaning(layout.compare(embeddings.vectors))), context, model, embeddings)


@router.post(
    ROOT.path,
    response_model=Rows | ChunkRows | Cosines,
    responses=AS_BYTES,
    summary="/embed or /similarity, depending on the body",
)
async def either(body: Annotated[AnyRequest, Body()], context: Context) -> Response:
    if isinstance(body, SimilarityRequest):
        return await similarity(body, context)
    return await embed_texts(body, context)


@router.post(
    SEARCH.path,
    response_model=list[Found],
    response_model_exclude_none=True,
    summary="Rank texts by their cosine with a query",
)
async def search(body: SearchRequest, context: Context) -> Response:
    if not body.texts:
        raise EmptyInput("texts is an empty list; send at least one text")
    with lease(context, body.model) as model:
        query, document = (name if name in model.bundle.named else None for name in SEARCH_NAMES)
        parts = [
            Part([body.query], named_template(context, model, query if body.prompt_name is None else body.prompt_name)),
            Part(body.texts, document),
        ]
        meaning = _meaning(model, body.calibrated, parts)
        embeddings = await embed(parts, context, model, body, lambda index: f"texts[{index - 1}]" if index else "query")
        return await respond(lambda: [_ranked(body, cosines(embeddings.vectors), meaning)], context, model, embeddings)


def _meaning(model: Model, calibrated: bool, parts: list[Part]) -> Callable[[Array], Array]:
    """Return the function that turns cosines into the response's numbers.

    Raises ValidationFailed if the model has no calibration curve, or none for texts in these templates.
    """
    if not calibrated:
        return lambda cosines: cosines
    curve = model.calibration and model.calibration.curves.get(model.session.precision)
    if not curve and model.bridge and CALIBRATION_FILE in model.bundle.spec.files:
        raise ValidationFailed(
            f"the calibration of model {model.name} does not fit the vectors that its bridge gives; omit calibrated, "
            "or serve the model without --bridge"
        )
    if not curve:
        raise ValidationFailed(
            f"calibrated is true, but model {model.name} has no calibration of its {model.session.precision} graph; "
            "omit calibrated, or add one to the bundle with `cloze calibrate`"
        )
    if template := next((part.template for part in parts if part.template is not None), None):
        raise ValidationFailed(
            f"calibrated is true, but the texts use the template {template!r}; the calibration of model "
            f"{model.name} holds only for its own template: omit calibrated"
        )
    return curve


def _ranked(body: SearchRequest, cosines: Array, meaning: Callable[[Array], Array]) -> bytes:
    """Return the best texts by cosine, as JSON. Texts with equal cosines keep their order."""
    scores = meaning(cosines)
    best = np.argsort(-cosines, kind="stable")[: body.top_k]
    if body.threshold is not None:
        best = best[scores[best] >= body.threshold]
    ranked: list[dict[str, Any]] = [{"index": int(index), "score": float(scores[index])} for index in best]
    if body.return_text:
        ranked = [{**row, "text": body.texts[row["index"]]} for row in ranked]
    return orjson.dumps(ranked)


def _layout(inputs: Sentences | Pairs | Lists) -> Layout:
    """Raises EmptyInput and ValidationFailed."""
    match inputs:
        case Pairs(pairs=[_, *_] as pairs):
            return Layout(
                [text for pair in pairs for text in pair],
                lambda index: f"inputs.pairs[{index // 2}][{index % 2}]",
                lambda vectors: pair_cosines(vectors[::2], vectors[1::2]),
            )
        case Lists(source_sentences=[_, *_] as sources, sentences=[_, *_] as sentences):
            rows, cells = len(sources), len(sources) * len(sentences)
            if cells > MAX_SIMILARITIES:
                raise ValidationFailed(
                    f"the two lists make {cells} cosines; at most {MAX_SIMILARITIES} are allowed: send shorter lists"
                )
            return Layout(
                [*sources, *sentences],
                lambda index: (
                    f"inputs.source_sentences[{index}]" if index < rows else f"inputs.sentences[{index - rows}]"
                ),
                lambda vectors: cosine_matrix(vectors[:rows], vectors[rows:]),
            )
        case Sentences(sentences=[_, *_] as sentences):
            return Layout(
                [inputs.source_sentence, *sentences],
                lambda index: f"inputs.sentences[{index - 1}]" if index else "inputs.source_sentence",
                cosines,
            )
    raise EmptyInput("a list in inputs is empty; send at least one text")
