"""Embedding files of any size, on one machine or on a Ray cluster: `python -m service.bulk IN OUT --bundle B`.

`Embed` is public: it adds the vectors of a bundle to tables of texts in any other pipeline.
"""

from service.bulk.embed import Embed, Embedded

__all__ = ["Embed", "Embedded"]
