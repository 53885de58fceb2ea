"""A template: fixed words around one text, with at most one mask.

This module handles strings only; `cloze.encoding.text` turns them into token ids.
"""

from dataclasses import dataclass
from typing import Literal, Self, get_args

from cloze.encoding.errors import TemplateError

TEXT = "[X]"
MASK = "[MASK]"  # for every tokenizer, even if its own token is <mask>

PoolingMode = Literal["mask", "cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"]
POOLINGS: tuple[str, ...] = get_args(PoolingMode)


@dataclass(frozen=True)
class Template:
    """`prefix` + text + `suffix`. A mask, if there is one, is in one of them. The plain template is `[X]`."""

    prefix: str
    suffix: str

    @classmethod
    def parse(cls, source: str, pooling: PoolingMode) -> Self:
        """Parse a template such as `This sentence of "[X]" means [MASK].`

        Raises TemplateError unless it contains `[X]` exactly once, and `[MASK]` exactly once for the pooling `mask`
        and never for the others.
        """
        if source.count(TEXT) != 1:
            raise TemplateError(
                f"template {source!r} has {TEXT} {source.count(TEXT)} times; "
                f"write {TEXT} exactly once, where the text goes"
            )
        if "<mask>" in source:
            raise TemplateError(f"template {source!r}: write {MASK} instead of <mask>, for every tokenizer")
        masks, expected = source.count(MASK), int(pooling == "mask")
        if masks != expected:
            advice = f"write {MASK} exactly once" if expected else f"remove {MASK}, or choose the pooling 'mask'"
            raise TemplateError(f"template {source!r} has {MASK} {masks} times, but pooling is {pooling!r}; {advice}")
        prefix, suffix = source.strip().split(TEXT)
        return cls(prefix, suffix)

    def __str__(self) -> str:
        return self.prefix + TEXT + self.suffix
