"""cloze convert BUNDLE OUT: a bundle that sentence-transformers can load as well.

The graphs do not change. The weights come from the run that the bundle was exported from, if it is given; their digest
confirms that it is that run. Otherwise they are read back from a graph. The weights of an int8 graph are rounded, so
that the vectors differ slightly from the trained model's, about as much as the vectors of the graph do.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard
from pydantic import Field
from pydantic_settings import CliPositionalArg

from cloze.command import run
from cloze.encoding.bundle import Bundle, EmbeddingConfig, learnt_parts, seal, staging
from cloze.encoding.canaries import CANARY_FILE
from cloze.encoding.text import TOKENIZER_FILES
from cloze.options import Options
from cloze.training.errors import RunError


class ConvertOptions(Options):
    """Copy a bundle and add the files that sentence-transformers loads."""

    bundle: CliPositionalArg[Path] = Field(description="bundle that cloze export wrote")
    out: CliPositionalArg[Path] = Field(description="bundle to write; an existing bundle is replaced")
    run: Path | None = Field(
        None,
        description="run that the bundle was exported from, as the source of the weights (default: the bundle's graph)",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = ConvertOptions.parse(arguments, "cloze convert")
    convert(options.bundle, options.out, options.run)
    print(f"{options.out}: sentence-transformers can load it")


def convert(path: Path, out: Path, run: Path | None) -> None:
    """Raises ClozeError, and then leaves nothing behind."""
    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.export.parity import probes
    from cloze.training.hub.sentence_transformer import is_sentence_transformer, write
    from cloze.training.model.encoder import SentenceEncoder, weights_digest

    bundle = Bundle.load(path)
    if is_sentence_transformer(bundle.path):
        raise RunError(f"sentence-transformers can already load {path}; there is nothing to convert")
    config = EmbeddingConfig(**{name: getattr(bundle.spec, name) for name in EmbeddingConfig.model_fields})
    encoder = SentenceEncoder.load(str(run or bundle.path), **config.model_dump())
    if run is not None:
        _check_run(run, weights_digest(encoder), bundle)
    if out.resolve() != bundle.path.resolve() and (warning := learnt_parts(out)):
        print(warning, file=sys.stderr)
    with staging(out) as folder:
        bundle.copy(folder)
        usage = write(encoder, folder, probes(config.max_tokens))
        if run is None:
            usage += " Its weights were read back from a graph; those of an int8 graph are rounded."
        for name in ("config.json", *TOKENIZER_FILES):
            shutil.copyfile(bundle.path / name, folder / name)
        card = ModelCard.load(folder / "README.md")
        card.data.library_name = "sentence-transformers"
        card.text = f"{card.text.rstrip()}\n\n{usage}\n"
        card.save(folder / "README.md")
        seal(folder, config, bundle.spec.dimension, bundle.spec.weights, bundle.spec.provenance)


def _check_run(run: Path, weights: str, bundle: Bundle) -> None:
    """Raises RunError unless the bundle was exported from the run whose weights have this digest."""
    if CANARY_FILE not in bundle.spec.files:
        raise RunError(
            f"{bundle.path} was exported by an earlier Cloze, which stored no digest of the weights; export {run} "
            "again with --sentence-transformers"
        )
    if weights != bundle.spec.weights:
        raise RunError(
            f"{run} is not the run that {bundle.path} was exported from: its weights have another digest; give the "
            f"right run, or export {run} with --sentence-transformers"
        )


if __name__ == "__main__":
    sys.exit(run(main))
