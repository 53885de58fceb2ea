"""POST /predict: labels of texts, by the heads of the model, in text-embeddings-inference's wire format."""

from typing import Any, Final

import numpy as np
import orjson
from fastapi import APIRouter, Response

from cloze.encoding.heads import HEAD_FOLDER, ClassifierHead
from cloze.service.errors import EmptyInput, ValidationFailed
from cloze.service.http.embed import embed
from cloze.service.http.errors import documented
from cloze.service.http.request import Context, JSONRoute, lease
from cloze.service.http.response import respond
from cloze.service.http.schemas import Predictions, PredictRequest
from cloze.service.inference.model import Model, Part
from cloze.service.inference.vectors import Vectors, finish
from cloze.service.routes import PREDICT

MAX_PREDICTIONS: Final = 2**18  # per response; a million JSON objects take 300 MB
OWN: Final = (
    "a head works only with vectors of the model's own template: omit prompt_name, and name the model itself, not an "
    "alias with a template"
)

router = APIRouter(route_class=JSONRoute, responses=documented(), tags=["embedding"])


@router.post(PREDICT.path, response_model=Predictions, summary="Classify texts with the model's heads")
async def predict(body: PredictRequest, context: Context) -> Response:
    if body.prompt_name is not None:
        raise ValidationFailed(OWN)
    if body.inputs == []:
        raise EmptyInput("inputs is an empty list; send at least one text")
    with lease(context, body.model) as model:
        if context.record.template is not None:
            raise ValidationFailed(OWN)
        heads = _heads(model, body.head)
        texts = [body.inputs] if isinstance(body.inputs, str) else [_only(text) for text in body.inputs]
        single = isinstance(body.inputs, str)
        labels = sum(len(head.labels) for head in heads.values())
        if (count := labels * len(texts)) > MAX_PREDICTIONS:
            raise ValidationFailed(
                f"{len(texts)} texts and {labels} labels make {count} predictions; at most {MAX_PREDICTIONS} are "
                "allowed: send fewer texts, or name fewer heads"
            )
        embeddings = await embed(
            [Part(texts)], context, model, body, lambda index: "inputs" if single else f"inputs[{index}]"
        )
        return await respond(lambda: [_as_json(body, heads, embeddings.vectors)], context, model, embeddings)


def _heads(model: Model, requested: str | list[str] | None) -> dict[str, ClassifierHead]:
    """Return the heads by name. Raises ValidationFailed if the model has no such head."""
    if model.bridge and any(name.startswith(f"{HEAD_FOLDER}/") for name in model.bundle.spec.files):
        raise ValidationFailed(
            f"the heads of model {model.name} do not fit the vectors that its bridge gives; serve it without --bridge"
        )
    available = ", ".join(model.heads) or "none; add one to the bundle with `cloze head`"
    if requested is None and len(model.heads) != 1:
        raise ValidationFailed(f"head is not given; the heads of model {model.name} are: {available}")
    names = list(model.heads) if requested is None else [requested] if isinstance(requested, str) else requested
    for name in names:
        if name not in model.heads:
            raise ValidationFailed(f"head is {name!r:.200}; the heads of model {model.name} are: {available}")
    return {name: model.heads[name] for name in names}


def _only(text: str | list[str]) -> str:
    return text if isinstance(text, str) else text[0]


def _as_json(body: PredictRequest, heads: dict[str, ClassifierHead], vectors: Vectors) -> bytes:
    units = finish(vectors, normalize=True)
    answers = {name: _labels(body, head, units) for name, head in heads.items()}
    if isinstance(body.inputs, str) or isinstance(body.inputs[0], str):
        answers = {name: labels[0] for name, labels in answers.items()}
    return orjson.dumps(answers if isinstance(body.head, list) else next(iter(answers.values())))


def _labels(body: PredictRequest, head: ClassifierHead, units: Vectors) -> list[Any]:
    """Return the labels of each text, the most probable first."""
    scores = head.scores(units)
    probabilities = head.probabilities(scores)
    kept = np.ones_like(scores, dtype=bool)
    if body.abstain:
        reached = probabilities >= (np.inf if head.threshold is None else head.threshold)
        kept = reached if head.several else np.broadcast_to(reached.any(axis=1, keepdims=True), scores.shape)
    shown = scores if body.raw_scores else probabilities
    order = np.argsort(-scores, axis=1, kind="stable")
    return [
        [{"label": head.labels[label], "score": float(row[label])} for label in labels if keep[label]]
        for row, labels, keep in zip(shown, order, kept, strict=True)
    ]
