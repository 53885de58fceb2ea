"""Write an encoder as a run whose mean pooling weights the tokens by their frequency in a corpus."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cloze.encoding.template import TEXT
from cloze.training.bar import bar, console
from cloze.training.data.corpus import Corpus, read_corpus
from cloze.training.encoder_source import encoder_folder, kind_of, of_library, saved_config
from cloze.training.errors import RunError
from cloze.training.hub.adoption import CHECKED, load_sentence_transformer, refuse_layers_behind
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.token_weights import TokenWeights
from cloze.training.run_folder import Run, provenance_of_encoder, with_sources

KEPT: Final = ("parent", "recipe", "data", "commit", "seeds", "rows", "versions")  # keys of a run's provenance
ROWS: Final = 1024  # rows of the corpus that are tokenised together


def weigh(model: str, out: Path, paths: Sequence[str], columns: Sequence[str], smoothing: float) -> None:
    """Write the run `out`: the run, bundle or encoder `model` with token weights computed from the texts of `paths`.

    Raises RunError, CorpusError, EncoderError, BundleError.
    """
    run, kind = Run.fresh(out), kind_of(model)
    corpus = read_corpus(paths, columns)
    encoder = _encoder(model) if kind == "encoder" else SentenceEncoder.load(model)
    if encoder.config.pooling != "mean":
        raise RunError(
            f"{model} has {encoder.config.pooling} pooling, but token weights need mean pooling; choose another model"
        )
    run.make()
    special = encoder.text_encoder.special.ids
    encoder.token_weights = TokenWeights.of_counts(_counts(encoder, corpus), smoothing, special)
    former: dict[str, Any] = Run(Path(model)).provenance() if kind == "run" else provenance_of_encoder(model)
    # without the scores, which were computed with other vectors
    provenance: dict[str, Any] = {name: former[name] for name in KEPT if name in former}
    weights = {"smoothing": smoothing, "corpus": list(paths), "columns": list(columns)}
    provenance["recipe"] |= {"token_weights": weights}
    encoder.save(run.model)
    run.write_provenance(with_sources(provenance, corpus))
    console.print(f"{run.model}: {model} with token weights; next: {run.export_command}")


def _encoder(source: str) -> SentenceEncoder:
    """An encoder that is neither a run nor a bundle, with its own embedding configuration; without one, a mean."""
    if saved_config(Path(encoder_folder(source))) is not None:
        return SentenceEncoder.load(source)
    if not of_library(source):
        return SentenceEncoder.load(source, template=TEXT, pooling="mean")
    refuse_layers_behind(source)
    return load_sentence_transformer(source, CHECKED)


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
