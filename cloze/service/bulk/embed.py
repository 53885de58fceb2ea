"""Embed many texts at once, with the same template, truncation and graph as `POST /embed`."""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import SecretStr

from cloze.encoding.bundle import Bundle
from cloze.encoding.chunks import chunked, least_tokens
from cloze.encoding.errors import OptionError, TextError, first_line
from cloze.encoding.text import TextEncoder, Tokens, token_batches
from cloze.service.bulk.remote import CONNECTIONS, REQUEST_TOKENS, Remote
from cloze.service.errors import FORKED, BackendFailed, SessionError
from cloze.service.inference.model import MAX_TEXT_CHARACTERS
from cloze.service.inference.session import Session
from cloze.service.inference.threads import share_threads
from cloze.service.inference.vectors import Array, Format, chunk_means, finish, pack
from cloze.service.settings import PrecisionChoice, ProviderChoice

Dtype = Literal["float32", "float16", "int8", "binary"]
FORMATS: Final[dict[Dtype, tuple[Format, pa.DataType]]] = {
    "float32": ("float", pa.float32()),
    "float16": ("float16", pa.float16()),
    "int8": ("int8", pa.int8()),
    "binary": ("ubinary", pa.uint8()),
}
SPACE: Final = b"embedding_space"  # key of a table's metadata
ADDED: Final = ("embedding", "tokens", "truncated", "error")
SLICE: Final = 256  # texts that are tokenised in one call
NO_KEY: Final = SecretStr("")


class Embedded(NamedTuple):
    """The result for each text. `errors` has the reason for each text without a vector, by its index."""

    vectors: Array  # (texts, dimensions), of the dtype; zeros for a text with an error
    tokens: NDArray[np.int32]  # of the complete sequence, including the template
    truncated: NDArray[np.bool_]
    errors: dict[int, str]


class Embed:
    """Adds vectors to tables of texts. Thread-safe; a process needs only one.

        ray.data.read_parquet("texts").map_batches(
            Embed, fn_constructor_args=["models/cloze-mini"], batch_format="pyarrow", compute=ActorPoolStrategy(size=2)
        )

    The columns `embedding` (a list of fixed size), `tokens`, `truncated` and `error` are added. A row whose text cannot
    be embedded has no embedding, and the reason in `error`. The schema's metadata has the `embedding_space`.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        text_column: str = "text",
        prompt_name: str | None = None,
        dtype: Dtype = "float32",
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = True,
        chunk_tokens: int | None = None,
        precision: PrecisionChoice = "auto",
        provider: ProviderChoice = "auto",
        threads: int = 0,
        server: str = "",
        key: SecretStr = NO_KEY,
    ) -> None:
        """Load the bundle. `threads` is the number of CPU threads that run the graph; 0 means the available CPUs.

        With `server`, the address of a service of the same bundle, the service's graph runs and none is loaded here.

        `prompt_name` names one of the bundle's templates; None means the bundle's own. With `chunk_tokens`, the vector
        of a text with more tokens is the mean of the vectors of its chunks, which have at most as many. Raises
        BundleError, SessionError, and OptionError if the bundle has fewer dimensions, no such template or no room for a
        chunk.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the pools below use the CPUs
        self.bundle, self._process = Bundle.load(bundle), os.getpid()
        self.bundle.check_dimensions(dimensions)
        self._text_encoder = self.bundle.encoder_of(prompt_name)
        check_chunks(chunk_tokens, self._text_encoder)
        shared = share_threads(threads)
        self._compute: Callable[[list[str], list[Tokens]], NDArray[np.float32]]
        self._check_graph: Callable[[], object]
        self._remote: Remote | None = None
        if server:
            self._remote = remote = Remote(server, key, self.bundle, prompt_name)
            self._compute = lambda texts, tokens: remote.embed(texts)
            self._check_graph = lambda: None  # `remote` checks it
            self._limits, batches, on_cpu = (REQUEST_TOKENS, remote.most_texts), CONNECTIONS, False
        else:
            session = Session.load(self.bundle, precision=precision, provider=provider, threads=shared.per_batch)
            pad, shortest = self._text_encoder.pad, self._text_encoder.shortest
            self._compute = lambda texts, tokens: session.run(pad([sequence.ids for sequence in tokens]))
            self._check_graph = lambda: session.run(pad([shortest]))
            self._limits, on_cpu = (session.batches.tokens, sys.maxsize), session.provider == "cpu"
            batches = shared.batches if on_cpu else 1
        self.text_column = text_column
        self.dtype: Dtype = dtype
        self.dimensions = dimensions
        self.normalize = normalize
        self.truncate = truncate
        self.chunk_tokens = chunk_tokens
        self._graphs: Executor = ThreadPoolExecutor(batches)
        self._tokenizers = self._graphs if on_cpu else ThreadPoolExecutor(shared.batches * shared.per_batch)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the table with the columns ADDED. Raises OptionError if its columns do not allow that."""
        check_columns(table.schema, self.text_column)
        if self._remote is not None:
            self._remote.check()
        embedded = self.embed(as_texts(table.column(self.text_column)))
        failed = np.isin(np.arange(len(table)), list(embedded.errors))
        _, number_type = FORMATS[self.dtype]
        values = pa.array(embedded.vectors.reshape(-1), number_type)
        columns: tuple[Any, ...] = (
            pa.FixedSizeListArray.from_arrays(values, embedded.vectors.shape[1], mask=pa.array(failed)),
            pa.array(embedded.tokens),
            pa.array(embedded.truncated),
            pa.array([embedded.errors.get(row) for row in range(len(table))], pa.string()),
        )
        for name, column in zip(ADDED, columns, strict=True):
            table = table.append_column(name, column)
        return table.replace_schema_metadata({**(table.schema.metadata or {}), SPACE: self.bundle.spec.space})

    def embed(self, texts: Sequence[str | bytes | None]) -> Embedded:
        """Embed every text; bytes are UTF-8. Equal texts are embedded once. Raises OptionError, and SessionError if the
        graph fails on every text.
        """
        if os.getpid() != self._process:
            raise OptionError(FORKED)
        texts = [texts] if isinstance(texts, str | bytes) else texts
        rows, errors = _distinct(texts)
        distinct = list(rows)
        parts, owners = self._parts(distinct)
        tokens, refused = self._tokenize(parts)
        vectors, failed = self._run(parts, tokens)
        for part, reason in (failed | refused).items():
            errors |= dict.fromkeys(rows[distinct[owners[part]]], reason)
        lengths = np.zeros(len(distinct) + 1, dtype=np.int32)
        np.add.at(lengths, owners, [len(sequence.ids) for sequence in tokens])
        cut = np.zeros(len(distinct) + 1, dtype=np.bool_)
        np.logical_or.at(cut, owners, [sequence.cut > 0 for sequence in tokens])
        indices = np.full(len(texts), len(distinct))  # of each text's vector; the last vector is zeros
        for index, text in enumerate(distinct):
            indices[rows[text]] = index
        if self.chunk_tokens is not None:
            vectors = chunk_means(vectors, [*owners, len(distinct)], [*map(len, parts), 1])
        finished = self._finish(vectors)[indices]
        finished[list(errors)] = 0
        return Embedded(finished, lengths[indices], cut[indices], errors)

    def _parts(self, texts: list[str]) -> tuple[list[str], list[int]]:
        """Return the chunks of all texts, or the texts themselves without `chunk_tokens`, and each one's text index."""
        if self.chunk_tokens is None:
            return texts, list(range(len(texts)))
        chunks = list(self._tokenizers.map(self._chunks, texts))
        owners = [owner for owner, parts in enumerate(chunks) for _ in parts]
        return [part for parts in chunks for part in parts], owners

    def _chunks(self, text: str) -> list[str]:
        assert self.chunk_tokens is not None
        try:
            return [text[chunk.start : chunk.stop] for chunk in chunked(self._text_encoder, text, self.chunk_tokens)]
        except TextError:
            return [text]  # encoding this text will fail with the reason

    def _tokenize(self, texts: list[str]) -> tuple[list[Tokens], dict[int, str]]:
        """Return the tokens of each text, empty for a text that was refused, and the reasons by index."""
        firsts = range(0, len(texts), SLICE)
        slices = list(self._tokenizers.map(lambda first: self._encode(texts[first : first + SLICE]), firsts))
        refused = {
            first + index: reason
            for first, (_, refusals) in zip(firsts, slices, strict=True)
            for index, reason in refusals
        }
        return [sequence for tokens, _ in slices for sequence in tokens], refused

    def _encode(self, texts: list[str]) -> tuple[list[Tokens], list[tuple[int, str]]]:
        try:
            return self._text_encoder.encode(texts, truncate=self.truncate), []
        except TextError as error:
            if len(texts) == 1:
                return [Tokens([], 0)], [(0, str(error.args[0]).strip())]
        tokens, refused = list[Tokens](), list[tuple[int, str]]()
        for index, text in enumerate(texts):
            encoded, reasons = self._encode([text])
            tokens += encoded
            refused += [(index, reason) for _, reason in reasons]
        return tokens, refused

    def _run(self, texts: list[str], tokens: list[Tokens]) -> tuple[NDArray[np.float32], dict[int, str]]:
        """Return a vector for each sequence, then a row of zeros, and the reasons for the failures by index."""
        vectors = np.zeros((len(tokens) + 1, self.bundle.spec.dimension), dtype=np.float32)
        errors: dict[int, str] = {}

        def run(indices: list[int]) -> None:
            try:
                vectors[indices] = self._compute(
                    [texts[index] for index in indices], [tokens[index] for index in indices]
                )
            except BackendFailed as error:
                if len(indices) == 1:
                    reason = errors[indices[0]] = first_line(error.__cause__ or error)
                    self._refuse_broken_graph(reason)
                    return
                run(indices[: len(indices) // 2])
                run(indices[len(indices) // 2 :])

        accepted = [index for index, sequence in enumerate(tokens) if sequence.ids]
        batches = list(token_batches([len(tokens[index].ids) for index in accepted], *self._limits))
        longest_first = ([accepted[row] for row in rows] for rows in reversed(batches))  # so that no thread ends late
        list(self._graphs.map(run, longest_first))  # raises what a batch raised
        return vectors, errors

    def _refuse_broken_graph(self, reason: str) -> None:
        """Raise SessionError if the graph fails on the template alone too: the failed text was not the cause."""
        try:
            self._check_graph()
        except BackendFailed as error:
            raise SessionError(
                f"{self.bundle.path}: the graph now fails on every text ({reason}); free the machine's memory, or "
                "restart its GPU, and start the same job again"
            ) from error

    def _finish(self, vectors: NDArray[np.float32]) -> Array:
        finished = finish(vectors, normalize=self.normalize, dimensions=self.dimensions)
        return pack(finished, FORMATS[self.dtype][0])


def check_chunks(tokens: int | None, encoder: TextEncoder) -> None:
    """Raise OptionError if chunks of `tokens` do not fit into the template."""
    if tokens is not None and not (least := least_tokens(encoder)) <= tokens <= encoder.text_tokens:
        raise OptionError(
            f"chunk_tokens is {tokens}; write {least} to {encoder.text_tokens}, which fit into the template"
        )


def check_columns(schema: pa.Schema, text_column: str) -> None:
    """Raise OptionError if there is no such text column, or if a column that would be added exists already."""
    if text_column not in schema.names:
        raise OptionError(f"there is no column {text_column!r}; the columns are {', '.join(schema.names)}")
    column_type = schema.field(text_column).type
    if pa.types.is_dictionary(column_type):
        column_type = column_type.value_type
    if not any(test(column_type) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        raise OptionError(f"the column {text_column!r} is of type {column_type}, not text; choose another column")
    if existing := [name for name in ADDED if name in schema.names]:
        raise OptionError(
            f"the column {existing[0]!r} exists already; rename it, or keep only the columns that you need"
        )


def as_texts(column: pa.ChunkedArray) -> list[bytes | None]:
    """Return the bytes of a text column, because a text may not be valid UTF-8."""
    texts: list[bytes | None] = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    return texts


def _distinct(texts: Sequence[str | bytes | None]) -> tuple[dict[str, list[int]], dict[int, str]]:
    """Return the indices of each distinct text, and by index the reasons why others cannot be embedded."""
    rows: dict[str, list[int]] = {}
    errors: dict[int, str] = {}
    for row, text in enumerate(texts):
        try:
            decoded = text.decode() if isinstance(text, bytes) else text
        except UnicodeDecodeError as error:
            errors[row] = f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
            continue
        if decoded is None:
            errors[row] = "the text is null"
        elif len(decoded) > MAX_TEXT_CHARACTERS:
            errors[row] = f"has {len(decoded)} characters; at most {MAX_TEXT_CHARACTERS} are allowed"
        else:
            rows.setdefault(decoded, []).append(row)
    return rows, errors
