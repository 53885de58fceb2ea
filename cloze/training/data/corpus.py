"""A corpus: files of text as rows of sentences, counted and checked before a model is loaded.

A row has one sentence (a line of a .txt file) or one per column (csv, tsv, jsonl). With `next_sentences` it also has
the sentences of the next row. With `scored` its last column is a score. Empty rows and rows outside the length limits
are skipped and counted. The others are written to a file on disk, so that a corpus may be larger than the memory.
"""

import math
import os
import random
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from glob import glob, has_magic
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from cloze.encoding.bundle import Source, sha256
from cloze.encoding.rows import COMPRESSIONS, ENDINGS, RowsError, ending_of, read_rows, uncompressed
from cloze.encoding.rows import read_lines as lines_of
from cloze.training.bar import bar
from cloze.training.data.stored_rows import ChosenRows, Row, StoredRows, places_of
from cloze.training.errors import CorpusError


@dataclass
class Corpus:
    """Rows to train on, the files they come from, and how many rows were skipped, by reason.

    `held_out` are rows of the same files that are not trained on. `starts` has the places, before any sampling, of the
    rows that do not directly follow another row of the same file.
    """

    rows: Sequence[Row] = ()
    held_out: list[Row] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    empty: int = 0
    outside: int = 0
    last: int = 0  # rows without a next one
    repeated: int = 0  # rows equal to a held-out row, or sharing a text with one
    starts: "array[int]" = field(default_factory=partial(array, "q"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def __str__(self) -> str:
        left_out = f"left out: {self.empty:,} empty, {self.outside:,} by length"
        if self.last:
            left_out += f", {self.last:,} without a next sentence"
        if self.repeated:
            left_out += f", {self.repeated:,} with text of rows held out"
        held_out = f"; held out: {len(self.held_out):,}" if self.held_out else ""
        return f"{len(self):,} rows from {len(self.sources)} files; {left_out}{held_out}"

    def hold_out(self, count: int, seed: int, *, whole: bool = False, linked: bool = False) -> Self:
        """The corpus with `count` rows, drawn by the seed, held out; other rows that equal one of them are dropped.

        With `whole`, rows with the same first text are held out together or not at all, and at most `count` rows are.
        With `linked`, rows that share a text with a held-out row are dropped too.
        """
        rng = random.Random(seed)
        chosen = self._whole(count, rng) if whole else rng.sample(range(len(self.rows)), count)
        held_out = [self.rows[place] for place in chosen]
        kept = np.ones(len(self.rows), dtype=bool)
        kept[places_of(self.rows, set(held_out))] = False
        if linked:
            texts = set(chain.from_iterable(held_out))
            kept &= np.fromiter((texts.isdisjoint(row) for row in self.rows), bool, len(self.rows))
        places = np.flatnonzero(kept)
        repeated = len(self.rows) - len(chosen) - len(places)
        return replace(self, rows=ChosenRows(self.rows, places), held_out=held_out, repeated=repeated)

    def _whole(self, count: int, rng: random.Random) -> list[int]:
        places: dict[str, list[int]] = defaultdict(list)
        for place, (first, *_) in enumerate(self.rows):
            places[first].append(place)
        groups, chosen = list(places.values()), list[int]()
        rng.shuffle(groups)
        for group in groups:
            chosen += group if len(chosen) + len(group) <= count else []
        return chosen

    def files(self) -> NDArray[np.int64]:
        """The index of each row's file, (n)."""
        places = self.rows.places if isinstance(self.rows, ChosenRows) else np.arange(len(self.rows))
        return np.searchsorted(np.cumsum([source.sentences for source in self.sources]), places, side="right")


def read_corpus(
    paths: Sequence[str],
    columns: Sequence[str] = (),
    min_words: int = 1,
    max_words: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    next_sentences: bool = False,
    scored: bool = False,
) -> Corpus:
    """Read every file, in order; then keep a random, seeded `sample` of the rows, if set.

    A path may be a pattern, such as `data/*.jsonl`. It stands for the files that match it, sorted by name; `**` matches
    folders at any depth.

    With `next_sentences` a row also has the sentences of the next row, which must directly follow it in the file. With
    `scored` the last column is a number, stored in the row as a text that `float` reads.

    Raises CorpusError, with file and line, for a missing file, a pattern without files, a missing column, bytes that
    are not UTF-8 or a score that is not a number.
    """
    files = [file for path in paths for file in files_of(path)]
    corpus = Corpus()
    rows = (
        row
        for path in files
        for row in _counted(corpus, path, _fitting(corpus, path, columns, min_words, max_words, scored), next_sentences)
    )
    corpus.rows = _stored(bar(rows, desc="reading", unit=" rows", unit_scale=True))
    if not corpus.rows:
        raise CorpusError(
            f"no sentences remain from {', '.join(paths)}: {corpus}; check the files, min_words and max_words"
        )
    if sample is not None and sample < len(corpus.rows):
        places = random.Random(seed).sample(range(len(corpus.rows)), sample)
        corpus.rows = ChosenRows(corpus.rows, np.array(places))
    return corpus


def read_lines(path: Path) -> Iterator[str]:
    """Lines with their line ends, as UTF-8 text. Raises CorpusError, which names the line, if it is not UTF-8."""
    with _stream(path) as stream:
        for number, line in lines_of(stream, str(path)):
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise CorpusError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert it to UTF-8") from error


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and record of each row of a csv, tsv or jsonl file, compressed or not, or of a parquet file.

    The rows of a parquet file are numbered from 1.
    """
    suffix = _suffix(path)
    if suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    if suffix == ".txt":
        raise CorpusError(f"{path} has no columns; give a .csv, .tsv, .jsonl or .parquet file")
    with _stream(path) as stream:
        for number, row in read_rows(stream, str(path)):
            if isinstance(row, str):
                raise CorpusError(f"{path}, line {number}: {row}")
            yield number, row


@contextmanager
def _stream(path: Path) -> Iterator[IO[bytes]]:
    """Open a file and decompress it. Raises CorpusError, also for errors while it is read."""
    try:
        with path.open("rb") as raw:
            yield uncompressed(raw, path.name)
    except RowsError as error:
        raise CorpusError(str(error)) from error
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error})") from error


def finite_score(score: object, location: str) -> float:
    """The number in a cell. Raises CorpusError, which names the cell's location."""
    try:
        number = float(score)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(score, bool) or "_" in str(score):  # Python reads 1_0 as 10
        raise CorpusError(f"{location}: score {score!r} is not a number; write one such as 3.5")
    return number


def files_of(path: str) -> list[Path]:
    """The file, or the files that match a pattern, sorted by name. Raises CorpusError."""
    if Path(path).is_file():
        return [Path(path)]
    if has_magic(path):
        files = sorted(named_in_utf8(file) for file in map(Path, glob(path, recursive=True)) if file.is_file())
        if not files:
            raise CorpusError(f"no file matches {path}; check the pattern")
        return files
    problem = "is a folder" if Path(path).is_dir() else "does not exist"
    raise CorpusError(f"{path} {problem}; give the path of a file of sentences, or a pattern such as 'data/*.txt'")


def files_below(folder: Path) -> list[Path]:
    """The files of a folder at any depth, sorted by name, without hidden ones. Links to folders are followed last.

    A file that can be reached in several ways is there once, by its path without links if there is one.
    """
    files, seen, starts = list[Path](), set[str](), [folder]
    while starts:
        links = list[Path]()
        for parent, folders, names in chain.from_iterable(map(os.walk, starts)):
            new = os.path.realpath(parent) not in seen
            seen.add(os.path.realpath(parent))
            folders[:] = sorted(name for name in folders if new and not name.startswith("."))
            links += [Path(parent, name) for name in folders if os.path.islink(os.path.join(parent, name))]
            files += [Path(parent, name) for name in names if new and not name.startswith(".")]
        starts = sorted(links)
    return sorted(file for file in files if file.is_file())


def named_in_utf8(file: Path) -> Path:
    """The file. Raises CorpusError if its name is not UTF-8, because output files could not contain it."""
    try:
        str(file).encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"the name of the file {os.fsencode(file)!r} is not UTF-8; rename the file") from error
    return file


def check_not_read(out: Path, paths: Sequence[str]) -> None:
    """Raises CorpusError if `out` is one of the files of these paths and patterns, or if these have no files."""
    if out.resolve() in [file.resolve() for path in paths for file in files_of(path)]:
        raise CorpusError(f"{out} would overwrite one of the files that are read; name another file")


def _stored(rows: Iterable[Row]) -> StoredRows:
    try:
        return StoredRows.write(rows)
    except OSError as error:
        raise CorpusError(
            f"the sentences cannot be stored in {tempfile.gettempdir()} ({error}); free space there, or set TMPDIR to "
            "another folder"
        ) from error


def _counted(corpus: Corpus, path: Path, rows: Iterable[Row | None], next_sentences: bool) -> Iterator[Row]:
    """Yield the rows of a file, with the next row's sentences if `next_sentences`; then add the file to `corpus`."""
    before, count, follows = sum(source.sentences for source in corpus.sources), 0, False
    for row, following in pairwise(chain(rows, [None])):
        if row is None:
            follows = False
            continue
        if next_sentences and following is None:
            corpus.last += 1
            continue
        if not follows:
            corpus.starts.append(before + count)
        follows = True
        count += 1
        yield row + following if next_sentences and following else row
    corpus.sources.append(Source(name=path.name, sentences=count, sha256=sha256(path)))


def _fitting(
    corpus: Corpus, path: Path, columns: Sequence[str], min_words: int, max_words: int | None, scored: bool
) -> Iterator[Row | None]:
    """The rows of a file, with None in place of each skipped row, which `corpus` counts."""
    unlimited = min_words == 1 and max_words is None  # then the words are not counted, which would take long
    for row in _rows(path, columns, scored):
        texts = row[:-1] if scored else row
        if not all(map(_says_something, texts)):
            corpus.empty += 1
            yield None
        elif unlimited or all(min_words <= len(text.split()) <= (max_words or len(text)) for text in texts):
            yield row
        else:
            corpus.outside += 1
            yield None


def _rows(path: Path, columns: Sequence[str], scored: bool) -> Iterator[Row]:
    if _suffix(path) == ".txt" and len(columns) < 2:
        for line in read_lines(path):
            yield (line.strip(),)
        return
    for number, record in read_records(path):
        if not columns:
            raise CorpusError(
                f"{path} has columns {', '.join(map(str, record))}; name the column to read with --columns (with "
                "--corpus-columns for the option --corpus of `cloze mine`)"
            )
        for column in columns:
            if column not in record:
                names = ", ".join(map(str, record))
                raise CorpusError(f"{path}, line {number}: no column {column!r}; it has {names}: name one of these")
        texts = columns[:-1] if scored else columns
        for column in texts:
            if not isinstance(record[column], str | None):
                raise CorpusError(f"{path}, line {number}: {column} is {record[column]!r}; write a text")
        row = tuple((record[column] or "").strip() for column in texts)
        if scored and any(row):
            row = (*row, str(finite_score(record[columns[-1]], f"{path}, line {number}")))
        elif scored:
            row = (*row, "0")  # the empty last row of a spreadsheet, which is skipped
        yield row


def _says_something(text: str) -> bool:
    """Whether a stripped text has more than blanks and invisible characters, which a tokenizer removes."""
    return bool(text) and (text[0].isprintable() or any(map(str.isprintable, text.replace(" ", ""))))


def _suffix(path: Path) -> str:
    suffix = ending_of(path.name)
    if suffix not in ENDINGS and path.suffix != ".parquet":
        raise CorpusError(
            f"{path}: cannot tell the format from its name; use .txt, .csv, .tsv or .jsonl, or one of these with "
            f"{', '.join(COMPRESSIONS[:-1])} or {COMPRESSIONS[-1]}, or .parquet"
        )
    return suffix


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows, without columns of dates and times: they are not text, and Python cannot represent some of them."""
    from pyarrow import ArrowException, parquet, types  # here, because it is large and few files are parquet

    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise CorpusError(f"{path} has two columns named {twice[0]!r}; rename one of them")
        read = [field.name for field in file.schema_arrow if not types.is_temporal(field.type)]
        batches = file.iter_batches(columns=read)
        yield from enumerate((record for batch in batches for record in _with_texts(batch).to_pylist()), 1)
    except (ArrowException, OSError, OverflowError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]})") from error


def _with_texts(batch: Any) -> Any:
    """Decode the binary columns of a parquet batch that hold UTF-8: Spark and others write text in this form."""
    from pyarrow import ArrowInvalid, string, types

    for place, column in enumerate(batch.schema):
        if types.is_binary(column.type) or types.is_large_binary(column.type):
            with suppress(ArrowInvalid):  # not UTF-8
                batch = batch.set_column(place, column.name, batch.column(place).cast(string()))
    return batch
