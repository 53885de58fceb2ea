"""A template: fixed words around one text, and one mask to read.

Knows strings only; `encoding.text` turns them into token ids.
"""

from dataclasses import dataclass
from typing import Literal, Self, get_args

from encoding.errors import TemplateError

__all__ = ["MASK", "READ_OUTS", "TEXT", "ReadOut", "Template"]

TEXT = "[X]"
MASK = "[MASK]"  # spelt so for every tokenizer, RoBERTa's <mask> included

ReadOut = Literal["mask", "cls", "mean"]
READ_OUTS: tuple[str, ...] = get_args(ReadOut)


@dataclass(frozen=True)
class Template:
    """`prefix` + text + `suffix`; a mask, where there is one, stands in either.

    The plain template is `[X]`: nothing around the text.
    """

    prefix: str
    suffix: str

    @classmethod
    def parse(cls, source: str, read_out: ReadOut) -> Self:
        """Read `This sentence of "[X]" means [MASK].`

        Raises TemplateError unless `[X]` stands in it exactly once, and `[MASK]` exactly once for the
        read-out `mask` and not at all for the others.
        """
        if source.count(TEXT) != 1:
            raise TemplateError(
                f"template {source!r} has {TEXT} {source.count(TEXT)} times; "
                f"write {TEXT} exactly once, where the text goes"
            )
        if "<mask>" in source:
            raise TemplateError(f"template {source!r}: write {MASK}, not <mask>, whichever the tokenizer")
        masks, wanted = source.count(MASK), int(read_out == "mask")
        if masks != wanted:
            advice = f"write {MASK} exactly once" if wanted else f"remove {MASK}, or choose the read-out 'mask'"
            raise TemplateError(f"template {source!r} has {MASK} {masks} times, read-out is {read_out!r}; {advice}")
        prefix, suffix = source.strip().split(TEXT)
        return cls(prefix, suffix)

    def __str__(self) -> str:
        return self.prefix + TEXT + self.suffix
