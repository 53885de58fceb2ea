"""Embedding files of any size, on one machine or on a Ray cluster: `cloze bulk IN OUT --bundle B`.

`Embed` is public: in any other pipeline, it adds the vectors of a bundle to tables of texts.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloze.service.bulk.embed import Embed, Embedded

__all__ = ["Embed", "Embedded"]


def __getattr__(name: str) -> Any:
    """Import pyarrow only when it is needed, so that the command can say that it is not installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cloze.service.bulk import embed

    return getattr(embed, name)
