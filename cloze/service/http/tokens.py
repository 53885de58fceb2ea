"""POST /tokenize and POST /decode: what the model sees of a text, and token ids as text. No graph runs."""

from collections.abc import Callable
from typing import Final

import orjson
from fastapi import APIRouter, Response

from cloze.encoding.errors import TextError
from cloze.service.errors import EmptyInput, ValidationFailed, too_many
from cloze.service.http.errors import documented
from cloze.service.http.request import MAX_DECODE_IDS, Context, JSONRoute, RequestContext, lease, named_template
from cloze.service.http.schemas import DecodeRequest, TokenInfo, TokenizeRequest
from cloze.service.routes import DECODE, TOKENIZE

MAX_TOKENIZE_CHARACTERS: Final = 2**18  # the JSON of a token is a hundred times its text

router = APIRouter(route_class=JSONRoute, responses=documented(), tags=["embedding"])


@router.post(
    TOKENIZE.path, response_model=list[list[TokenInfo]], summary="The tokens of texts, and which are truncated"
)
async def tokenize(body: TokenizeRequest, context: Context) -> Response:
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts:
        raise EmptyInput("inputs is an empty list; send at least one text")
    special = body.add_special_tokens
    with lease(context, body.model) as model:
        model.check_lengths(texts)
        encoder = model.text_encoders[named_template(context, model, body.prompt_name)]
        size = sum(map(len, texts)) + encoder.template_tokens * len(texts) * special
        if size > MAX_TOKENIZE_CHARACTERS:
            raise ValidationFailed(
                f"the texts and their templates have {size} characters and tokens; at most {MAX_TOKENIZE_CHARACTERS} "
                "are allowed in a request: split it"
            )

        def explain() -> bytes:
            explained = (encoder.explain(text, direction=body.direction) for text in texts)
            return orjson.dumps([[t._asdict() for t in tokens if special or not t.template] for tokens in explained])

        return await _respond(explain, context, size)


@router.post(DECODE.path, response_model=list[str], summary="Decode token ids to text")
async def decode(body: DecodeRequest, context: Context) -> Response:
    if not body.ids:
        raise EmptyInput("ids is an empty list; send at least one id")
    sequences = [ids for ids in body.ids if isinstance(ids, list)] or [[i for i in body.ids if isinstance(i, int)]]
    with lease(context, body.model) as model:
        model.check_lengths(sequences)
        if (count := sum(map(len, sequences))) > MAX_DECODE_IDS:
            raise too_many(count, "token ids", MAX_DECODE_IDS)
        encoder = model.bundle.text_encoder

        def write() -> bytes:
            texts = []
            for index, ids in enumerate(sequences):
                try:
                    texts.append(encoder.decode(ids, body.skip_special_tokens))
                except TextError as error:
                    error.subject = f"ids[{index}], " if isinstance(body.ids[0], list) else "ids, "
                    raise
            return orjson.dumps(texts)

        return await _respond(write, context)


async def _respond(write: Callable[[], bytes], context: RequestContext, characters: int = 0) -> Response:
    content = await context.services.executors.workers.run(context.record.client, write, characters)
    return Response(content, media_type="application/json")
