"""cloze adopt MODEL OUT: any sentence-transformers model -> a bundle.

The bundle is compared with sentence-transformers itself. It is written completely or not at all.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import Field
from pydantic_settings import CliPositionalArg

from cloze.command import run
from cloze.training.export.options import BundleOptions

PROBED: Final = 128  # tokens of the longest text that is compared, unless the model's own limit is lower


class AdoptOptions(BundleOptions):
    """Make a bundle from a sentence-transformers model, and compare it with sentence-transformers itself."""

    model: CliPositionalArg[str] = Field(description="folder of a sentence-transformers model, or its hub name")
    out: CliPositionalArg[Path] = Field(description="bundle to write; an existing bundle is replaced")
    revision: str | None = Field(None, description="branch, tag or commit of the model on the hub")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = AdoptOptions.parse(arguments, "cloze adopt")

    # huggingface_hub and torch take seconds to load; help and option errors need not wait
    from cloze.adoption.hub import bundle_on_hub, copy_bundle, model_folder

    source = options.model
    files = model_folder(source, options.revision)
    if bundle_on_hub(source, files):
        copy_bundle(source, options.revision, files, options.out, options.given())
        return

    from cloze.training.bar import console
    from cloze.training.evaluation.suites import load_suites
    from cloze.training.export.bundle import write_bundle
    from cloze.training.export.card import provenance_of_others
    from cloze.training.export.parity import probes
    from cloze.training.hub.adoption import load_sentence_transformer
    from cloze.training.model.encoder import SentenceEncoder

    def load(folder: Path) -> SentenceEncoder:
        console.print(f"{source}: comparing its tokens and vectors with those of sentence-transformers")
        encoder = load_sentence_transformer(source, probes(PROBED), options.max_tokens, files)
        encoder.backbone.config.save_pretrained(folder)
        encoder.tokenizer.save_pretrained(folder)
        return encoder

    tasks = load_suites(options.data) if options.data else []
    provenance = provenance_of_others(source, "adopt")
    write_bundle(options.out, load, provenance, files, options, tasks)


if __name__ == "__main__":
    sys.exit(run(main))
