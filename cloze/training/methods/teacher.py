"""A teacher's vectors of all texts, computed before the first step and kept in the run folder until the last.

A file is named by the digest of its texts, so that one folder can hold the vectors of several lists.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloze.encoding.files import replacing
from cloze.encoding.template import TEXT
from cloze.training.bar import bar
from cloze.training.data.teacher_vectors import HELD
from cloze.training.encoder_source import own_config
from cloze.training.evaluation.measures import Embed
from cloze.training.hub.adoption import load_as_served
from cloze.training.methods.gather import rank_and_count, wait
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.model.pretrained import fastest_device

TEXTS: Final = 8192  # per file, and per lookup
SHOWN: Final = 256  # texts between two updates of the progress bar


def read_by_itself(source: str, compiled: bool, config: Mapping[str, str] = MappingProxyType({})) -> Embed:
    """The `embed` of `by_itself`; `compiled` compiles it unless it is a graph. Raises ClozeError."""
    return embed_of(by_itself(source, config), compiled)


def by_itself(source: str, config: Mapping[str, str] = MappingProxyType({})) -> SentenceEncoder | GraphEncoder:
    """Load a run, a bundle, a folder or a hub name as it is served. Raises ClozeError.

    `config` replaces its template and its pooling. If it has none of its own, they default to `[X]` and the mean.
    """
    encoder = None if config else load_as_served(source)
    if encoder is None:
        keys = {"template": TEXT, "pooling": "mean"} | (own_config(source) or {}) | dict(config)
        encoder = SentenceEncoder.load(source, **keys).to(fastest_device())
    return encoder


def embed_of(encoder: SentenceEncoder | GraphEncoder, compiled: bool) -> Embed:
    """The encoder's `embed`; `compiled` compiles it unless it is a graph."""
    if compiled and isinstance(encoder, SentenceEncoder):
        encoder.backbone.compile(dynamic=True)
    return encoder.embed


def parts(texts: Iterable[str]) -> Iterator[Sequence[str]]:
    """The texts, TEXTS at a time."""
    remaining = iter(texts)
    while part := list(islice(remaining, TEXTS)):
        yield part


def embedded(parts: Iterable[Sequence[str]], count: int, embed: Embed, folder: Path) -> Iterator[NDArray[np.float16]]:
    """The vectors (n, d) of each part of `count` texts, with a progress bar.

    Each process embeds its share of the parts and writes the vectors to the folder, from which all processes read. A
    resumed run uses the files that exist.
    """
    rank, processes = rank_and_count()
    folder.mkdir(parents=True, exist_ok=True)
    files = list[Path]()
    with bar(total=count, desc="teacher", unit=" texts") as shown:
        for number, texts in enumerate(parts):
            digest = blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()
            files.append(file := folder / f"{digest}.npy")
            if number % processes == rank and not file.is_file():
                order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
                vectors: list[NDArray[np.float32]] = []
                for rows in np.array_split(np.array(order), max(1, len(texts) // SHOWN)):
                    vectors.append(embed([texts[row] for row in rows]))
                    shown.update(len(rows))
                with replacing(file) as partial, partial.open("wb") as out:
                    np.save(out, np.concatenate(vectors)[np.argsort(order)].astype(HELD))
            else:
                shown.total -= len(texts)
    wait()
    return map(np.load, files)


def embedded_list(texts: Sequence[str], embed: Embed, folder: Path) -> NDArray[np.float32]:
    """`embedded` for a list of texts, (n, d)."""
    return np.concatenate(list(embedded(parts(texts), len(texts), embed, folder))).astype(np.float32)
