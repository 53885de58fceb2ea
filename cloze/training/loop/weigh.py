"""An encoder whose mean has the token weights of a corpus, as a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from cloze.training.bar import bar
from cloze.training.data.corpus import Corpus, read_corpus
from cloze.training.encoder_source import encoder_folder, kind_of, saved_config
from cloze.training.errors import RunError
from cloze.training.hub.sentence_transformer import is_sentence_transformer, saved_settings
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.token_weights import TokenWeights
from cloze.training.run_folder import Run, provenance_of_encoder, with_sources

__all__ = ["weigh"]

ROWS = 1024  # of the corpus, tokenised together

console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def weigh(model: str, out: Path, paths: Sequence[str], columns: Sequence[str], smoothing: float) -> None:
    """Write the run `out`: a run, a bundle or an encoder with token weights that the texts of `paths` decide.

    Raises RunError, CorpusError, EncoderError, BundleError.
    """
    run, kind, folder = Run.fresh(out), kind_of(model), encoder_folder(model)
    encoder = SentenceEncoder.load(folder, **(_settings(Path(folder)) if kind == "encoder" else {}))
    if encoder.config.pooling != "mean":
        raise RunError(f"{model} reads its vector by {encoder.config.pooling}; only the tokens of a mean have weights")
    corpus = read_corpus(paths, columns)
    special = encoder.text_encoder.special.ids
    encoder.token_weights = TokenWeights.of_counts(_counts(encoder, corpus), smoothing, special)
    provenance: dict[str, Any] = Run(Path(model)).provenance() if kind == "run" else provenance_of_encoder(model)
    weights = {"smoothing": smoothing, "corpus": list(paths), "columns": list(columns)}
    provenance["recipe"] |= {"token_weights": weights}
    run.make()
    encoder.save(run.model)
    run.write_provenance(with_sources(provenance, corpus))
    console.print(f"{run.model}: {model} with token weights; next: cloze export {out} models/NAME")


def _settings(folder: Path) -> dict[str, Any]:
    """What an encoder's folder does not say to SentenceEncoder.load. A bare encoder is read as a mean."""
    if is_sentence_transformer(folder):
        return saved_settings(folder)
    return {} if saved_config(folder) else {"template": "[X]", "pooling": "mean"}


def _counts(encoder: SentenceEncoder, corpus: Corpus) -> NDArray[np.int64]:
    """How often each token id occurs in the sequences of the corpus, (vocabulary), template included."""
    counts = np.zeros(encoder.word_embeddings.num_embeddings, np.int64)
    with bar(total=len(corpus), desc="counting", unit=" rows") as shown:
        for first in range(0, len(corpus), ROWS):
            rows = [corpus[place] for place in range(first, min(first + ROWS, len(corpus)))]
            texts = [text for row in rows for text in row]
            ids = [token for tokens in encoder.text_encoder.encode(texts) for token in tokens.ids]
            counts += np.bincount(ids, minlength=len(counts))
            shown.update(len(rows))
    return counts
