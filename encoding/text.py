"""Texts to token ids: the one road, walked alike by training, export and the service.

A sequence is built from ids, `[CLS] prefix + text + suffix [SEP]`, so that truncation can only reach the
text, the mask sits at a constant place, and a text that says "[MASK]" stays a text.

White space. A text is stripped. A blank before `[X]` in the template belongs to the first word of the text
(`' [X]` gives RoBERTa's `Ġhello`, `"[X]"` gives `hello`); a blank before `[MASK]` belongs to the mask, as in
RoBERTa's own `<mask>` token. Word-piece tokenizers see no difference.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from encoding.errors import BundleError, TemplateError, TextTooLong
from encoding.template import MASK, Template

__all__ = ["TOKENIZER_FILES", "Batch", "Direction", "SpecialTokens", "TextEncoder", "Tokens", "with_final_period"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

Direction = Literal["left", "right"]


class Batch(NamedTuple):
    """What a graph takes: two int64 arrays of shape (texts, longest); padding is on the right."""

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]


class Tokens(NamedTuple):
    """One text in its template: `ids` from [CLS] to [SEP], and how many tokens of the text were `cut`."""

    ids: list[int]
    cut: int


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the tokens that a text can never spell. `mask` is None where the vocabulary has none."""

    cls: int
    sep: int
    pad: int
    mask: int | None

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> Self:
        """Read the names in `tokenizer_config.json`. Raises BundleError where one is missing."""
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
            found = token_id(role)
            if found is None:
                raise BundleError(
                    f"{path} names no {role}_token of the vocabulary; Cloze needs an encoder that has one"
                )
            return found

        return cls(required("cls"), required("sep"), required("pad"), token_id("mask"))


def with_final_period(text: str) -> str:
    """PromptBERT's rule at evaluation: a text that does not end in one of . ? " ' is given a period."""
    return text if not text or text[-1] in ".?\"'" else text + "."


class TextEncoder:
    """Puts texts into one template of one tokenizer.

    `prefix_ids` runs from [CLS] to the text, `suffix_ids` from the text to [SEP]; `mask_index` is the place of
    the mask as a Python index into the unpadded sequence: negative (counted from the end) where the mask
    follows the text, else positive; None where the template has no mask.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special: SpecialTokens,
        template: Template,
        max_tokens: int,
        final_period: bool = False,
    ) -> None:
        """Take `max_tokens` as the limit on the whole sequence, template and special tokens included.

        Raises TemplateError where the template leaves no room for a text or the vocabulary has no mask.
        """
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())  # the caller's own settings stay as they are
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "[MASK]" in a text stays text; tokenizer.json cannot say so
        self.special = special
        self.template = template
        self.max_tokens = max_tokens
        self.final_period = final_period
        self._blank = " " if template.prefix[-1:].isspace() else ""
        self.prefix_ids = [special.cls, *self._template_ids(template.prefix)]
        self.suffix_ids = [*self._template_ids(template.suffix), special.sep]
        if self.text_tokens < 1:
            raise TemplateError(
                f"template {str(template)!r} takes {self.template_tokens} tokens and max_tokens is {max_tokens}; "
                f"raise max_tokens to {self.template_tokens + 1} or more"
            )

    @classmethod
    def load(cls, folder: Path, template: Template, max_tokens: int, final_period: bool = False) -> Self:
        """Make one from a folder that holds TOKENIZER_FILES. Raises BundleError where they cannot be read."""
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise BundleError(f"{path} is not a readable tokenizer ({error})") from error
        return cls(tokenizer, SpecialTokens.load(folder, tokenizer), template, max_tokens, final_period)

    @property
    def template_tokens(self) -> int:
        """What every sequence costs before its text: template, [CLS] and [SEP]."""
        return len(self.prefix_ids) + len(self.suffix_ids)

    @property
    def text_tokens(self) -> int:
        """How many tokens of a text fit."""
        return self.max_tokens - self.template_tokens

    @property
    def mask_index(self) -> int | None:
        if MASK in self.template.suffix:
            return self.suffix_ids.index(self._mask_id) - len(self.suffix_ids)
        if MASK in self.template.prefix:
            return self.prefix_ids.index(self._mask_id)
        return None

    def encode(self, texts: Sequence[str], *, truncate: bool = True, direction: Direction = "right") -> list[Tokens]:
        """Put each text into the template, in order.

        `direction` is the side that a text too long loses. With `truncate=False` such a text raises
        TextTooLong instead, which names its position.
        """
        encodings = self._tokenizer.encode_batch_fast(list(map(self._prepare, texts)), add_special_tokens=False)
        sequences = []
        for position, encoding in enumerate(encodings):
            ids = encoding.ids
            cut = max(0, len(ids) - self.text_tokens)
            if cut and not truncate:
                raise TextTooLong(
                    f"text {position} has {len(ids)} tokens; at most {self.text_tokens} fit beside the template's "
                    f"{self.template_tokens}: shorten it or allow truncation"
                )
            if cut:
                ids = ids[cut:] if direction == "left" else ids[: self.text_tokens]
            sequences.append(Tokens([*self.prefix_ids, *ids, *self.suffix_ids], cut))
        return sequences

    def pad(self, sequences: Sequence[Sequence[int]]) -> Batch:
        """Join sequences of ids into one batch, as long as its longest."""
        longest = max(map(len, sequences), default=0)
        input_ids = np.full((len(sequences), longest), self.special.pad, dtype=np.int64)
        attention_mask = np.zeros_like(input_ids)
        for row, ids in enumerate(sequences):
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
        return Batch(input_ids, attention_mask)

    def batch(self, texts: Sequence[str]) -> Batch:
        """`encode` and `pad` in one step."""
        return self.pad([tokens.ids for tokens in self.encode(texts)])

    def _prepare(self, text: str) -> str:
        text = text.strip()
        if self.final_period:
            text = with_final_period(text)
        return self._blank + text if text else ""

    def _template_ids(self, part: str) -> list[int]:
        """Token ids of the template before or after the text; blanks before [X] and [MASK] are theirs."""
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
            raise TemplateError(f"template {str(self.template)!r} has {MASK}, and the tokenizer has no mask token")
        return self.special.mask
