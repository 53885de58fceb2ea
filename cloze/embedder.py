"""Embed texts with a bundle in this process, for notebooks and scripts. The vectors are the same as the service's."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import OptionError, first_line
from cloze.encoding.text import token_batches
from cloze.service.errors import FORKED, BackendFailed
from cloze.service.inference.session import Session
from cloze.service.inference.threads import share_threads
from cloze.service.inference.vectors import cosine_matrix, finish
from cloze.service.settings import PrecisionChoice, ProviderChoice

SLICE: Final = 4096  # texts that are tokenised and embedded at once, in batches of similar lengths
PATIENCE: Final = 1.0  # seconds before a progress bar is shown


class Embedder:
    """A loaded bundle. Thread-safe. A copy is the same object; unpickling loads the bundle again."""

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        *,
        precision: PrecisionChoice = "auto",
        provider: ProviderChoice = "auto",
        threads: int = 0,
    ) -> None:
        """Load a bundle as the service does, with the same checks. Raises BundleError, SessionError."""
        shared = share_threads(threads)
        self.bundle, self._process = Bundle.load(bundle), os.getpid()
        self._again = partial(
            Embedder, self.bundle.path.absolute(), precision=precision, provider=provider, threads=threads
        )
        self._session = Session.load(self.bundle, precision=precision, provider=provider, threads=shared.per_batch)
        self._pool = ThreadPoolExecutor(shared.batches if self._session.provider == "cpu" else 1)

    def __repr__(self) -> str:
        graph = f"{self._session.precision} on {self._session.provider}"
        return f"<{self.bundle.name}: {self.template!r}, {self.dimension} dimensions, {graph}>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[[], "Embedder"], tuple[()]]:
        return self._again, ()

    @property
    def dimension(self) -> int:
        """The number of dimensions of a vector."""
        return self.bundle.spec.dimension

    @property
    def template(self) -> str:
        """The template: the words around a text, which replaces [X]."""
        return self.bundle.spec.template

    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = True,
    ) -> NDArray[np.float32]:
        """Return a vector for each text, float32 (texts, dimensions), of length 1 unless `normalize` is False.

        `prompt_name` names one of the bundle's templates; None means the bundle's own. `dimensions` keeps only the
        first dimensions of a vector. A text that is too long is truncated, or raises TextError with `truncate=False`.
        On a terminal, a progress bar is shown after a second. Raises OptionError, TextError, BackendFailed.
        """
        if os.getpid() != self._process:
            raise OptionError(FORKED)
        encoder, session = self.bundle.encoder_of(prompt_name), self._session
        self.bundle.check_dimensions(dimensions)
        listed = _listed(texts)
        vectors = np.empty((len(listed), dimensions or self.dimension), np.float32)
        with tqdm(total=len(listed), unit=" texts", delay=PATIENCE, leave=False, disable=None) as bar:
            for first in range(0, len(listed), SLICE):
                part = listed[first : first + SLICE]
                ids = [tokens.ids for tokens in encoder.encode(part, truncate=truncate, first=first)]
                read = np.empty((len(part), self.dimension), np.float32)

                def run(rows: list[int], ids: list[list[int]] = ids, read: NDArray[np.float32] = read) -> None:
                    read[rows] = session.run(encoder.pad([ids[row] for row in rows]))
                    bar.update(len(rows))

                try:
                    list(self._pool.map(run, token_batches(list(map(len, ids)), session.batches.tokens)))
                except BackendFailed as error:
                    reason = first_line(error.__cause__ or error)
                    raise BackendFailed(
                        f"texts {first} to {first + len(part) - 1}: the model failed: {reason}"
                    ) from error
                vectors[first : first + len(part)] = finish(read, normalize=normalize, dimensions=dimensions)
        return vectors

    def similarity(
        self, first: Sequence[str], second: Sequence[str], *, prompt_name: str | None = None
    ) -> NDArray[np.float64]:
        """Return the cosine of every text in `first` with every text in `second`, (first, second), within [-1, 1]."""
        left, right = (self.embed(texts, prompt_name=prompt_name, normalize=False) for texts in (first, second))
        return cosine_matrix(left, right)

    def tokens(self, text: str, *, prompt_name: str | None = None) -> list[str]:
        """Return the tokens that the graph reads: the text in its template, from [CLS] to [SEP]."""
        return [token.text for token in self.bundle.encoder_of(prompt_name).explain(text) if not token.cut]


def _listed(texts: Sequence[str]) -> list[str]:
    """Return the texts as a list; a single text becomes a list of one. Raises OptionError if one is not a text."""
    if (
        isinstance(texts, Mapping | set | frozenset)
        or not (isinstance(texts, Iterable) or hasattr(texts, "__getitem__"))
        or getattr(texts, "ndim", 1) != 1
    ):
        raise OptionError(f"the texts are a {type(texts).__name__}; give a list of them, such as a column of a table")
    listed = [texts] if isinstance(texts, str) else list(getattr(texts, "to_pylist", lambda: texts)())  # for pyarrow
    for index, text in enumerate(listed):
        if not isinstance(text, str):
            raise OptionError(f"text {index} is {text!r}, a {type(text).__name__}; give strings")
    return listed
