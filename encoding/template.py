"""A template: fixed words around one text, and one mask to read.

Knows strings only; `encoding.text` turns them into token ids.
"""

from dataclasses import dataclass
from typing import Literal, Self, get_args

from encoding.errors import TemplateError

__all__ = ["MASK", "POOLINGS", "TEXT", "PoolingMode", "Template"]

TEXT = "[X]"
MASK = "[MASK]"  # spelt so for every tokenizer, RoBERTa's <mask> included

PoolingMode = Literal["mask", "cls", "mean"]
POOLINGS: tuple[str, ...] = get_args(PoolingMode)


@dataclass(frozen=True)
class Template:
    """`prefix` + text + `suffix`; a mask, where there is one, stands in either.

    The plain template is `[X]`: nothing around the text.
    """

    prefix: str
    suffix: str

    @classmethod
    def parse(cls, source: str, pooling: PoolingMode) -> Self:
        """Read `This sentence of "[X]" means [MASK].`

        Raises TemplateError unless `[X]` stands in it exactly once, and `[MASK]` exactly once for the
        pooling `mask` and not at all for the others.
        """
        if source.count(TEXT) != 1:
            raise TemplateError(
                f"template {source!r} has {TEXT} {source.count(TEXT)} times; "
                f"write {TEXT} exactly once, where the text goes"
            )
        if "<mask>" in source:
            raise TemplateError(f"template {source!r}: write {MASK}, not <mask>, whichever the tokenizer")
        masks, wanted = source.count(MASK), int(pooling == "mask")
        if masks != wanted:
            advice = f"write {MASK} exactly once" if wanted else f"remove {MASK}, or choose the pooling 'mask'"
            raise TemplateError(f"template {source!r} has {MASK} {masks} times, pooling is {pooling!r}; {advice}")
        prefix, suffix = source.strip().split(TEXT)
        return cls(prefix, suffix)

    def __str__(self) -> str:
        return self.prefix + TEXT + self.suffix
