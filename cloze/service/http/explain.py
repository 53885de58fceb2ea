"""POST /explain: which words make two texts similar. Each is removed in turn, and the cosine is computed again."""

import re
from typing import Final, NamedTuple

import orjson
from fastapi import APIRouter, Response

from cloze.service.errors import ValidationFailed
from cloze.service.http.embed import embed
from cloze.service.http.errors import documented
from cloze.service.http.request import Context, JSONRoute, lease, named_template
from cloze.service.http.response import respond
from cloze.service.http.schemas import ExplainRequest, Explanation
from cloze.service.inference.model import Part
from cloze.service.inference.vectors import Vectors, pair_cosines
from cloze.service.routes import EXPLAIN
from cloze.service.settings import Settings

MAX_EXPLAINED_WORDS: Final = 256  # of both texts: each is one more text to embed
MAX_EXPLAINED_CHARACTERS: Final = 2**14  # of both texts: they are tokenised once for each word

MARKS: Final = r"\s!-/:-@\[-`{-~«»¿¡‐-‧‹-⁞、-〟！-／：-＠،؛؟।"  # white space and punctuation
WORD: Final = re.compile(rf"[^{MARKS}]+(?:['’.,‐-][^{MARKS}]+)*")  # don't, 3.5 and e-mail are one word each

router = APIRouter(route_class=JSONRoute, responses=documented(), tags=["embedding"])


class Word(NamedTuple):
    """`text[start:stop]` of a text, in characters."""

    start: int
    stop: int


@router.post(EXPLAIN.path, response_model=Explanation, summary="Which words make two texts similar")
async def explain(body: ExplainRequest, context: Context) -> Response:
    with lease(context, body.model) as model:
        words = _words(body.inputs, most_words(context.services.settings))
        owners = [owner for owner, text_words in enumerate(words) if len(text_words) > 1 for _ in text_words]
        rests = [
            without(body.inputs[owner], word)
            for owner, text_words in enumerate(words)
            if len(text_words) > 1
            for word in text_words
        ]
        part = Part([*body.inputs, *rests], named_template(context, model, body.prompt_name))
        embeddings = await embed([part], context, model, body, lambda index: f"inputs[{[0, 1, *owners][index]}]")
        return await respond(
            lambda: [_as_json(body.inputs, words, owners, embeddings.vectors)], context, model, embeddings
        )


def most_words(settings: Settings) -> int:
    """Return how many words the two texts may have together: a request has at most `max_client_batch_size` texts."""
    return min(MAX_EXPLAINED_WORDS, max(0, settings.max_client_batch_size - 2))


def without(text: str, word: Word) -> str:
    """Remove a word, and the white space that would then be double, at an end, or before punctuation."""
    before, after = text[: word.start], text[word.stop :]
    if before[-1:].isspace() and after[:1].isspace():
        return before + after.lstrip() if after.strip() else before.rstrip()
    return before.rstrip() + after.lstrip()


def _words(texts: list[str], limit: int) -> list[list[Word]]:
    """Find the words of each text. Raises ValidationFailed if there are too many."""
    if (characters := sum(map(len, texts))) > MAX_EXPLAINED_CHARACTERS:
        raise ValidationFailed(
            f"the two texts have {characters} characters; at most {MAX_EXPLAINED_CHARACTERS} are explained: "
            "shorten them"
        )
    words = [[Word(*match.span()) for match in WORD.finditer(text)] for text in texts]
    if (count := sum(map(len, words))) > limit:
        raise ValidationFailed(f"the two texts have {count} words; at most {limit} are explained: shorten them")
    return words


def _as_json(texts: list[str], words: list[list[Word]], owners: list[int], vectors: Vectors) -> bytes:
    """`vectors` has those of the two texts, then for each entry of `owners` that of its text without one word."""
    left, right = [0, *range(2, len(vectors))], [1, *(1 - owner for owner in owners)]
    cosine, *others = pair_cosines(vectors[left], vectors[right]).tolist()
    changes = iter([other - cosine for other in others])
    explained = [
        [
            {
                "word": text[word.start : word.stop],
                **word._asdict(),
                "change": next(changes) if len(text_words) > 1 else None,
            }
            for word in text_words
        ]
        for text, text_words in zip(texts, words, strict=True)
    ]
    return orjson.dumps({"cosine": cosine, "texts": explained})
