"""Texts to token ids: the only implementation, used by training, export and the service.

A sequence is built from ids, `[CLS] prefix + text + suffix [SEP]`. Truncation therefore only reaches the text, the mask
has a constant position, and "[MASK]" in a text is encoded as text.

White space: a text is stripped. A blank before `[X]` in the template belongs to the first word of the text (`' [X]`
gives RoBERTa's `Ġhello`, `"[X]"` gives `hello`). A blank before `[MASK]` belongs to the mask, as in RoBERTa's own
`<mask>` token. For word-piece tokenizers it makes no difference.
"""

import copy
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self
from unicodedata import category

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Regex, Tokenizer, pre_tokenizers

from cloze.encoding.errors import BundleError, TemplateError, TextError, TextTooLong
from cloze.encoding.template import MASK, Template

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

Direction = Literal["left", "right"]

Span = tuple[int, int] | tuple[None, None]
NOWHERE: Final[Span] = (None, None)
TOGETHER: Final = 1024  # texts tokenised at once, because the tokenizer's results take much more memory than the ids


class Batch(NamedTuple):
    """The inputs of a graph: two int64 arrays of shape (texts, longest), padded on the right."""

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]


class Tokens(NamedTuple):
    """One text in its template: `ids` from [CLS] to [SEP], and how many tokens of the text were `cut`."""

    ids: list[int]
    cut: int


class Token(NamedTuple):
    """One token of a sequence, and where it comes from.

    `text` is the token as it is in the vocabulary. The token's source is `text[start:stop]` of the caller's text. Both
    are None if the text does not contain it: for the template's tokens, the blank before [X] and an added period.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None
    template: bool  # part of the template: the same for every text
    cut: bool  # truncated: the model does not see it


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the special tokens, which no text can contain. `mask` is None if the vocabulary has none.

    `cls` is None for a decoder, whose sequences begin with the text.
    """

    cls: int | None
    sep: int
    pad: int
    mask: int | None

    def __contains__(self, token: int) -> bool:
        return token in (self.cls, self.sep, self.pad, self.mask)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for token in (self.cls, self.sep, self.pad, self.mask) if token is not None)

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> Self:
        """Read the names in `tokenizer_config.json`. Raises BundleError if one is missing."""
        path = folder / "tokenizer_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} cannot be read ({error}); save the tokenizer into {folder} again") from error

        def token_id(role: str) -> int | None:
            token = config.get(f"{role}_token")
            content = token["content"] if isinstance(token, dict) else token
            return None if content is None else tokenizer.token_to_id(content)

        def required(role: str) -> int:
            token = token_id(role)
            if token is None:
                raise BundleError(
                    f"{path} does not name a {role}_token that is in the vocabulary; choose an encoder that has one"
                )
            return token

        return cls(token_id("cls"), required("sep"), required("pad"), token_id("mask"))


def with_final_period(text: str) -> str:
    """Add a period to a text that does not end in one of . ? " ' (PromptBERT's rule at evaluation)."""
    return text if not text or text[-1] in ".?\"'" else text + "."


def _reserve(tokenizer: Tokenizer, special: SpecialTokens) -> None:
    """Make sure that no text is encoded to a special token.

    `encode_special_tokens` is not enough for unigram vocabularies such as XLM-R's, whose search for the best pieces can
    find a special token too. For these, the first character of its name is split off before the search.
    """
    tokenizer.encode_special_tokens = True  # tokenizer.json cannot store this
    spellings = {token: tokenizer.id_to_token(token) for token in special.ids}
    reachable = [
        spelling
        for token, spelling in spellings.items()
        if spelling and token in tokenizer.encode(spelling, add_special_tokens=False).ids
    ]
    if reachable:
        pattern = "|".join(f"{re.escape(spelling[0])}(?={re.escape(spelling[1:])})" for spelling in reachable)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        former = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, former]) if former else split


class TextEncoder:
    """Encodes texts in one template with one tokenizer.

    `prefix_ids` runs from [CLS] to the text, `suffix_ids` from the text to [SEP]. `mask_index` is the index of the mask
    in the unpadded sequence: negative if the mask follows the text, positive if it precedes it, None if the template
    has no mask.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special: SpecialTokens,
        template: Template,
        max_tokens: int,
        final_period: bool = False,
    ) -> None:
        """`max_tokens` limits the complete sequence, including template and special tokens.

        Raises TemplateError if the template leaves no room for a text, or the vocabulary has no mask.
        """
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())  # a copy, so that the caller's does not change
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        _reserve(self._tokenizer, special)
        self.special = special
        self.max_tokens = max_tokens
        self.final_period = final_period
        self._use(template)

    @classmethod
    def load(cls, folder: Path, template: Template, max_tokens: int, final_period: bool = False) -> Self:
        """Load the TOKENIZER_FILES of a folder. Raises BundleError if they cannot be read."""
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise BundleError(f"{path} is not a readable tokenizer ({error}); get or export the model again") from error
        return cls(tokenizer, SpecialTokens.load(folder, tokenizer), template, max_tokens, final_period)

    def within(self, template: Template) -> Self:
        """Return an encoder for another template with the same tokenizer and limit. Raises TemplateError."""
        encoder = copy.copy(self)
        encoder._use(template)
        return encoder

    @property
    def template_tokens(self) -> int:
        """Return the number of tokens in every sequence besides the text's: the template, [CLS] and [SEP]."""
        return len(self.prefix_ids) + len(self.suffix_ids)

    @property
    def text_tokens(self) -> int:
        """Return how many tokens of a text fit."""
        return self.max_tokens - self.template_tokens

    @property
    def vocabulary_size(self) -> int:
        """Return the size of the vocabulary, special tokens included."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    @property
    def id_range(self) -> range:
        """Return all ids up to the highest. The vocabulary may have gaps: ids without a token."""
        return range(1 + max(self._tokenizer.get_vocab().values()))

    @property
    def shortest(self) -> list[int]:
        """Return the sequence of an empty text."""
        return [*self.prefix_ids, *self.suffix_ids]

    @property
    def longest(self) -> list[int]:
        """Return a sequence of `max_tokens` tokens: one ordinary token, repeated, in the template."""
        ordinary = (token for token in range(self.vocabulary_size) if token not in self.special)
        known = (token for token in ordinary if self.knows(token))
        return [*self.prefix_ids, *[next(known, self.special.sep)] * self.text_tokens, *self.suffix_ids]

    @property
    def mask_index(self) -> int | None:
        if MASK in self.template.suffix:
            return self.suffix_ids.index(self._mask_id) - len(self.suffix_ids)
        if MASK in self.template.prefix:
            return self.prefix_ids.index(self._mask_id)
        return None

    def encode(
        self,
        texts: Sequence[str],
        *,
        truncate: bool = True,
        direction: Direction = "right",
        first: int = 0,
        max_text_tokens: int | None = None,
    ) -> list[Tokens]:
        """Encode each text in the template, in order.

        A text of more tokens than fit, or than `max_text_tokens`, is truncated on the side `direction`; with
        `truncate=False` it raises TextTooLong. A text that the tokenizer cannot encode raises TextError. Both errors
        have the text's position, counted from `first`, because a caller may pass a slice of its texts.
        """
        encodings = (
            encoding
            for start in range(0, len(texts), TOGETHER)
            for encoding in self._tokenize(texts[start : start + TOGETHER], first=first + start)
        )
        return [
            self._place(encoding.ids, position, truncate, direction, max_text_tokens)
            for position, encoding in enumerate(encodings, first)
        ]

    def encode_ids(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        truncate: bool = True,
        direction: Direction = "right",
        first: int = 0,
    ) -> list[Tokens]:
        """Do the same as `encode` for texts that are already token ids.

        The ids are those of the text, without template and special tokens. They must include the blank before [X] and
        the final period, if the text gets them: the ids of `explain(text)` without the template's give the result of
        `encode([text])`. An id outside the vocabulary, or of a special token, raises TextError.
        """
        for position, ids in enumerate(sequences, first):
            self._check(ids, position)
        return [self._place(list(ids), position, truncate, direction) for position, ids in enumerate(sequences, first)]

    def explain(self, text: str, *, direction: Direction = "right") -> list[Token]:
        """Return every token of the text's sequence, the truncated ones included, in order.

        The ids of the tokens that are not truncated are `encode([text], direction=direction)[0].ids`.
        """
        [encoding] = self._tokenize([text], offsets=True)
        ids = encoding.ids
        kept = self._kept(len(ids), direction)
        spans = enumerate(self._spans(text, encoding.offsets))
        return [
            *(self._token(token, template=True) for token in self.prefix_ids),
            *(self._token(ids[place], span, cut=place not in kept) for place, span in spans),
            *(self._token(token, template=True) for token in self.suffix_ids),
        ]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return where each token of the text begins and ends in it. Raises TextError."""
        [encoding] = self._tokenize([text], offsets=True)
        spans = self._spans(text, encoding.offsets)
        return [(start, stop) for start, stop in spans if start is not None and stop is not None]

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, however long, without the template's. Raises TextError."""
        [encoding] = self._tokenize([text])
        return len(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the ids as text, joined by the tokenizer. Raises TextError for an id outside the vocabulary."""
        for place, token in enumerate(ids):
            if wrong := self._unknown(token):
                raise TextError(f"place {place}: {wrong}")
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def knows(self, token: int) -> bool:
        """Whether the vocabulary has a token with this id."""
        return self._spelling(token) is not None

    def pad(self, sequences: Sequence[Sequence[int]]) -> Batch:
        """Pad sequences of ids to the longest, as one batch."""
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        attended = np.arange(lengths.max(initial=0)) < lengths[:, None]  # (n, L)
        input_ids = np.full(attended.shape, self.special.pad, dtype=np.int64)
        input_ids[attended] = np.fromiter(chain.from_iterable(sequences), np.int64, lengths.sum())
        return Batch(input_ids, attended.astype(np.int64))

    def batch(self, texts: Sequence[str]) -> Batch:
        """`encode` and `pad` in one step."""
        return self.pad([tokens.ids for tokens in self.encode(texts)])

    def _tokenize(self, texts: Sequence[str], *, offsets: bool = False, first: int = 0) -> list[Encoding]:
        """Tokenise every text. Offsets take longer and do not change the ids."""
        prepared = list(map(self._prepare, texts))
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        try:
            encodings: list[Encoding] = encode(prepared, add_special_tokens=False)
        except Exception as error:  # tokenizers raises plain Exception and does not name the text
            raise self._refused(prepared, error, first) from error
        return encodings

    def _refused(self, prepared: list[str], error: Exception, first: int) -> TextError:
        for position, text in enumerate(prepared, first):
            try:
                self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
            except Exception as own_error:
                reason = f"{type(own_error).__name__}: {own_error}"
                return TextError(f" cannot be tokenised ({reason}); change it", position=position)
        return TextError(
            f"the tokenizer fails on these {len(prepared)} texts together ({error}); send fewer texts at a time"
        )

    def _place(
        self, ids: list[int], position: int, truncate: bool, direction: Direction, max_text_tokens: int | None = None
    ) -> Tokens:
        kept = self._kept(len(ids), direction, max_text_tokens)
        cut = len(ids) - len(kept)
        if cut and not truncate:
            limit = f"{self.text_tokens} fit beside the template's {self.template_tokens}"
            if max_text_tokens is not None and max_text_tokens < self.text_tokens:
                limit = f"{max_text_tokens} are allowed by the request"
            raise TextTooLong(
                f" has {len(ids)} tokens; at most {limit}: shorten it or allow truncation", position=position
            )
        return Tokens([*self.prefix_ids, *ids[kept.start : kept.stop], *self.suffix_ids], cut)

    def _use(self, template: Template) -> None:
        self.template = template
        self._blank = " " if template.prefix[-1:].isspace() else ""
        first = [] if self.special.cls is None else [self.special.cls]
        self.prefix_ids = [*first, *self._template_ids(template.prefix)]
        self.suffix_ids = [*self._template_ids(template.suffix), self.special.sep]
        if self.text_tokens < 1:
            raise TemplateError(
                f"template {str(template)!r} takes {self.template_tokens} tokens and max_tokens is {self.max_tokens}; "
                f"raise max_tokens to {self.template_tokens + 1} or more"
            )

    def _kept(self, count: int, direction: Direction, max_text_tokens: int | None = None) -> range:
        """Return the indices of the tokens to keep, of a text's `count`: as many as fit, at most `max_text_tokens`."""
        room = self.text_tokens if max_text_tokens is None else min(max_text_tokens, self.text_tokens)
        cut = max(0, count - room)
        return range(cut, count) if direction == "left" else range(count - cut)

    def _spans(self, text: str, offsets: Sequence[tuple[int, int]]) -> Iterator[Span]:
        """Convert offsets in the prepared text to offsets in the text itself.

        A combining mark that is in no token, because the tokenizer strips accents, belongs to the token before it.
        """
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        shift = first - len(self._blank)
        begun = sorted({start + shift for start, _ in offsets} | {last})
        for start, stop in offsets:
            if stop + shift <= first or start + shift >= last:  # only the blank before the text or the period after it
                yield NOWHERE
                continue
            start, stop = max(start + shift, first), min(stop + shift, last)
            while start < stop and text[start].isspace():  # for some tokenizers, a word includes the blank before it
                start += 1
            if start == stop:  # a blank between two words
                yield NOWHERE
                continue
            following = begun[bisect_left(begun, stop)] if stop < last else last
            while stop < following and category(text[stop]).startswith("M"):
                stop += 1
            yield start, stop

    def _token(self, token: int, span: Span = NOWHERE, *, template: bool = False, cut: bool = False) -> Token:
        start, stop = span
        return Token(token, self._spelling(token) or "", token in self.special, start, stop, template, cut)

    def _check(self, ids: Sequence[int], position: int) -> None:
        for place, token in enumerate(ids):
            if wrong := self._unknown(token) or self._reserved(token):
                raise TextError(f", place {place}: {wrong}", position=position)

    def _unknown(self, token: int) -> str | None:
        if self.knows(token):
            return None
        return f"id {token} is outside the vocabulary of {self.vocabulary_size} tokens; send this model's own ids"

    def _reserved(self, token: int) -> str | None:
        if token not in self.special:
            return None
        return f"id {token} is the special token {self._spelling(token)}; leave it out: the template adds its own"

    def _spelling(self, token: int) -> str | None:
        try:
            spelling: str | None = self._tokenizer.id_to_token(token)
        except OverflowError:  # below 0, or wider than 32 bits
            return None
        return spelling

    def _prepare(self, text: str) -> str:
        text = text.strip()
        if self.final_period:
            text = with_final_period(text)
        return self._blank + text if text else ""

    def _template_ids(self, part: str) -> list[int]:
        """Return the token ids of the template's prefix or suffix, without the blanks before [X] and [MASK]."""
        before, mask, after = part.partition(MASK)
        if not mask:
            return self._ids(part)
        return [*self._ids(before), self._mask_id, *self._ids(after)]

    def _ids(self, words: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(words.rstrip(), add_special_tokens=False).ids
        return ids

    @property
    def _mask_id(self) -> int:
        if self.special.mask is None:
            raise TemplateError(
                f"template {str(self.template)!r} has {MASK}, and the tokenizer has no mask token; choose cls or mean "
                "pooling and a template without it"
            )
        return self.special.mask


def token_batches(lengths: Sequence[int], batch_tokens: int, batch_rows: int = sys.maxsize) -> Iterator[list[int]]:
    """Yield rows in order of length, in batches of at most `batch_rows` and `batch_tokens` (longest x count).

    A longer row is a batch of its own.
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (lengths[row] * (len(rows) + 1) > batch_tokens or len(rows) == batch_rows):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
