"""Teacher vectors of texts, computed once and written by `cloze bulk`, to learn from in every epoch.

Several teachers' vectors of one text are concatenated. A text is found by its digest, so that the order of the corpus
and a selection from it do not matter.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from cloze.training.bar import bar
from cloze.training.errors import CorpusError

SPACE: Final = b"embedding_space"  # key of a file's metadata
EMBEDDING: Final = "embedding"
BATCH: Final = 8192  # rows
SAMPLE: Final = 1024  # texts, approximately
HELD: Final = np.float16  # precise enough for unit vectors


@dataclass
class TeacherVectors:
    """`vectors` (n, d) of one teacher, or of several concatenated, for the texts with the sorted `digests` (n)."""

    digests: NDArray[np.uint64]
    vectors: NDArray[np.float16]
    sample: list[str]  # some of the texts, chosen by their digests

    @classmethod
    def read(cls, folders: Sequence[str], weights: Sequence[float], column: str) -> "TeacherVectors":
        """Read folders that cloze bulk wrote. `column` has the texts that were embedded.

        A teacher's unit vectors are multiplied by the root of its weight, so that the product of two rows is the
        weighted mean of the teachers' cosines. Only texts that all teachers embedded are kept. Raises CorpusError.
        """
        teachers = [_Teacher.open(Path(folder), column) for folder in folders]
        digests = np.unique(teachers[0].digests)
        for teacher in teachers[1:]:
            digests = np.intersect1d(digests, teacher.digests)
        if not len(digests):
            raise CorpusError(f"{', '.join(folders)} have no text in common; embed the same file with each teacher")
        sample = teachers[0].texts(digests[digests % max(1, len(digests) // SAMPLE) == 0])
        joined, last = cls(digests, _on_disk(len(digests), sum(teacher.width for teacher in teachers)), sample), 0
        for teacher, weight in zip(teachers, weights, strict=True):
            first, last = last, last + teacher.width
            teacher.write(joined, slice(first, last), (weight / sum(weights)) ** 0.5)
        return joined

    @classmethod
    def collected(cls, parts: Iterable[Sequence[str]], vectors: Iterable[NDArray[np.floating]]) -> "TeacherVectors":
        """The vectors (n, d) of each part of the texts, from one teacher. A text may occur in several parts."""
        digests_by_part: list[NDArray[np.uint64]] = []
        sample: dict[str, None] = {}
        step = 1  # the sample has the texts whose digest is a multiple of it; it is thinned as it grows
        for texts in parts:
            digests_by_part.append(np.array([_digest(text) for text in texts], dtype=np.uint64))
            sample |= dict.fromkeys(
                text for text, digest in zip(texts, digests_by_part[-1], strict=True) if digest % step == 0
            )
            while len(sample) > SAMPLE:
                step *= 2
                sample = {text: None for text in sample if _digest(text) % step == 0}
        digests = np.unique(np.concatenate(digests_by_part))
        stored: NDArray[np.float16] | None = None
        for part, rows in zip(vectors, digests_by_part, strict=True):
            stored = _on_disk(len(digests), part.shape[1]) if stored is None else stored
            stored[np.searchsorted(digests, rows)] = normalize(torch.from_numpy(part).float()).numpy()
        assert stored is not None, "a corpus has texts. This is a bug."
        return cls(digests, stored, list(sample))

    def of(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """The vectors of texts, (n, d). Raises CorpusError."""
        return np.array(self.vectors[self.find(texts)], dtype=np.float32)

    def find(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """The row of each text, (n). Raises CorpusError, which names the first text that has no vector."""
        digests = np.array([_digest(text) for text in texts], dtype=np.uint64)
        places = self.places(digests)
        missing = np.flatnonzero(self.digests[places] != digests)
        if len(missing):
            raise CorpusError(
                f"{len(missing):,} of {len(texts):,} texts do not have a vector from every teacher, such as "
                f"{texts[missing[0]][:60]!r}; embed the unchanged corpus with cloze bulk"
            )
        return places

    def places(self, digests: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The places (n) at which the digests are, or would be."""
        return np.searchsorted(self.digests, digests).clip(max=len(self.digests) - 1)

    def principal(self, width: int) -> tuple[NDArray[np.float32], float]:
        """The `width` principal axes of the uncentred vectors, (d, width), and the share of their squares kept."""
        moments = np.zeros((self.vectors.shape[1],) * 2)
        for rows in _slices(len(self.vectors), "principal axes"):
            part = self.vectors[rows].astype(np.float32)
            moments += part.T @ part
        values, axes = np.linalg.eigh(moments)  # ascending
        return axes[:, -width:].astype(np.float32), float(values[-width:].sum() / values.sum())

    def projected(self, axes: NDArray[np.float32]) -> "TeacherVectors":
        """The vectors times `axes` (d, width)."""
        vectors = _on_disk(len(self.vectors), axes.shape[1])
        for rows in _slices(len(self.vectors), "projecting"):
            vectors[rows] = self.vectors[rows].astype(np.float32) @ axes
        return TeacherVectors(self.digests, vectors, self.sample)


@dataclass
class _Teacher:
    """The files of one folder. `digests` (n) are the digests of its texts, in the order of the files."""

    folder: Path
    column: str
    files: Sequence[Any]  # pyarrow's ParquetFile, which is slow to import
    width: int
    digests: NDArray[np.uint64]

    @classmethod
    def open(cls, folder: Path, column: str) -> "_Teacher":
        """Read everything except the vectors. Raises CorpusError."""
        from pyarrow import parquet  # here, because it is large

        paths = sorted((folder / "vectors").glob("*/*.parquet"))
        if not paths:
            raise CorpusError(f"{folder} has no vectors/*/*.parquet; give a folder that cloze bulk wrote")
        with _readable(folder):
            files = [parquet.ParquetFile(path, memory_map=True) for path in paths]
            spaces = {(file.schema_arrow.metadata or {}).get(SPACE, b"").decode() for file in files}
            if len(spaces) > 1:
                raise CorpusError(
                    f"{folder} has vectors of several models ({', '.join(sorted(spaces))}); embed the texts again "
                    "with one"
                )
            width = _width(files[0].schema_arrow, column, folder)
            digests, at = np.empty(sum(file.metadata.num_rows for file in files), np.uint64), 0
            for batch in _batches(files, column, folder):
                digests[at : (at := at + len(batch))] = [_digest(text or "") for text in batch.to_pylist()]
        return cls(folder, column, files, width, digests)

    def texts(self, digests: NDArray[np.uint64]) -> list[str]:
        """The distinct texts with these digests. Raises CorpusError."""
        texts, at = list[str](), 0
        with _readable(self.folder):
            for batch in _batches(self.files, self.column, self.folder):
                chosen = np.isin(self.digests[at : (at := at + len(batch))], digests)
                texts += batch.filter(chosen).to_pylist()
        return list(dict.fromkeys(filter(None, texts)))

    def write(self, target: TeacherVectors, columns: slice, factor: float) -> None:
        """Write unit vectors times `factor` to these columns of `target`, for the texts it has. Raises CorpusError."""
        at = 0
        with _readable(self.folder):
            for batch in _batches(self.files, EMBEDDING, self.folder):
                digests = self.digests[at : (at := at + len(batch))]
                part = torch.from_numpy(batch.flatten().to_numpy(zero_copy_only=False).copy())
                units = normalize(part.view(len(batch), self.width).float()).mul_(factor).half().numpy()
                places = target.places(digests)
                known = target.digests[places] == digests
                target.vectors[places[known], columns] = units[known]


def _batches(files: Sequence[Any], column: str, folder: Path) -> Iterator[Any]:
    """The column in parts of up to BATCH rows, file after file, with a progress bar."""
    count = sum(file.metadata.num_rows for file in files)
    with bar(total=count, desc=f"{folder.name}: {column}", unit=" rows", unit_scale=True) as shown:
        for batch in (batch for file in files for batch in file.iter_batches(BATCH, columns=[column])):
            yield batch.column(0)
            shown.update(len(batch))


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Raises CorpusError if a file cannot be read."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise CorpusError(f"{folder} cannot be read ({str(error).splitlines()[0]}); embed the texts again") from error


def _width(schema: Any, column: str, folder: Path) -> int:
    """The dimension of the vectors. Raises CorpusError if the columns are not those of cloze bulk."""
    from pyarrow import types

    for name in (column, EMBEDDING):
        if name not in schema.names:
            raise CorpusError(f"{folder} has no column {name!r}; name one of {', '.join(schema.names)}")
    embedding_type = schema.field(EMBEDDING).type
    if not types.is_fixed_size_list(embedding_type) or types.is_uint8(embedding_type.value_type):
        raise CorpusError(
            f"{folder} has vectors of type {embedding_type}; embed the texts again with --dtype float32, "
            "float16 or int8"
        )
    return int(embedding_type.list_size)


def _digest(text: str) -> int:
    """The digest of the text without surrounding blanks, as in a corpus."""
    return int.from_bytes(blake2b(text.strip().encode(), digest_size=8).digest(), "little")


def _slices(count: int, name: str) -> Iterator[slice]:
    """Slices of up to BATCH rows, with a progress bar of this name."""
    for first in bar(range(0, count, BATCH), desc=name, unit=" parts"):
        yield slice(first, min(first + BATCH, count))


def _on_disk(rows: int, width: int) -> NDArray[np.float16]:
    """An array in an unlinked temporary file: the operating system keeps what is read in memory.

    Raises CorpusError if the disk has no space for it; a later write would otherwise end the process by a signal.
    """
    size = rows * width * np.dtype(HELD).itemsize
    try:
        with tempfile.TemporaryFile(prefix="cloze-vectors-") as file:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, HELD, "w+", shape=(rows, width))
    except OSError as error:
        raise CorpusError(
            f"the teacher's vectors, {size / 1e9:.1f} GB, cannot be stored in {tempfile.gettempdir()} ({error}); free "
            "space there, or set TMPDIR to another folder"
        ) from error
