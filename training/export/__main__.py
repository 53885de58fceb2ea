"""python -m training.export RUN OUT: a finished run -> graphs, compared with torch and scored -> a bundle.

A bundle that sentence-transformers has trained further is exported in the same way as a run.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from encoding.command import program
from encoding.command import run as run_command
from encoding.text import TOKENIZER_FILES
from evaluation.suites import load_suites
from training.errors import RunError
from training.export.bundle import BundleOptions, write_bundle
from training.export.card import provenance_of
from training.hub.sentence_transformer import is_sentence_transformer, saved_settings
from training.model.encoder import SentenceEncoder
from training.run_folder import Run, kind_of

__all__ = ["main"]


class ExportOptions(BundleOptions):
    """Export a finished run as a bundle of ONNX graphs, compared with torch and, with --data, scored."""

    run: CliPositionalArg[Path] = Field(
        description="folder of a finished run, or of a bundle that sentence-transformers has trained further"
    )
    out: CliPositionalArg[Path] = Field(description="bundle to write; a bundle there is replaced")
    denoise: bool | None = Field(
        None,
        description="subtract the vector of the template alone, or do not (PromptBERT; default: as in training)",
    )
    final_period: bool | None = Field(
        None,
        description="give a text without closing punctuation a period, or do not, as in PromptBERT's evaluation "
        "(default: as in training)",
    )
    sentence_transformers: bool = Field(False, description="write the files that sentence-transformers loads as well")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = ExportOptions.read(sys.argv[1:] if arguments is None else arguments, program("training.export"))
    model, settings = _source(options.run)
    provenance, parent = provenance_of(options.run)
    tasks = load_suites(options.data) if options.data else []
    asked = {"max_tokens": options.max_tokens, "denoising": options.denoise, "final_period": options.final_period}
    settings |= {name: value for name, value in asked.items() if value is not None}

    def load(folder: Path) -> SentenceEncoder:
        encoder = SentenceEncoder.load(str(model), **settings)
        for name in ("config.json", *TOKENIZER_FILES):
            shutil.copyfile(model / name, folder / name)
        return encoder

    write_bundle(
        options.out,
        load,
        provenance,
        parent,
        options,
        tasks,
        sentence_transformers=options.sentence_transformers,
    )


def _source(run: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a run's weights, and the settings that are not in it. Raises RunError, EncoderError."""
    kind = kind_of(str(run))
    if kind == "run":
        return Run(run).model, {}
    if kind == "encoder" and is_sentence_transformer(run):
        return run, saved_settings(run)
    raise RunError(f"{run} is not a run; export takes a folder that training.fit wrote")


if __name__ == "__main__":
    sys.exit(run_command(main))
