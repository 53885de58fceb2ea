"""`cloze adopt MODEL OUT` without torch: make a bundle of the model's own ONNX graph."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg

from cloze.adoption.hub import bundle_on_hub, copy_bundle, model_folder
from cloze.adoption.modules import graph_file
from cloze.command import run
from cloze.options import Options


class AdoptOptions(Options):
    """Make a bundle from the onnx/model.onnx of a sentence-transformers model. With torch there are more options."""

    model: CliPositionalArg[str] = Field(description="folder of a sentence-transformers model, or its hub name")
    out: CliPositionalArg[Path] = Field(description="bundle to write; an existing bundle is replaced")
    revision: str | None = Field(None, description="branch, tag or commit of the model on the hub")
    max_tokens: Annotated[int, Field(ge=3)] | None = Field(
        None, description="maximum number of tokens of a sequence, template included"
    )
    precision: Literal["fp32"] = Field("fp32", description="graph to make; fp16 and int8 need torch")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = AdoptOptions.parse(arguments, "cloze adopt")

    folder = model_folder(options.model, options.revision, graph=True)
    if bundle_on_hub(options.model, folder):
        copy_bundle(options.model, options.revision, folder, options.out, options.given())
        return
    graph_file(folder, options.model)  # checked first: without a graph, installing onnx would not help

    # importing onnx takes half a second, which the help and option errors do not need
    from cloze.adoption.bundle import write

    write(options.model, folder, options.out, options.max_tokens)


if __name__ == "__main__":
    sys.exit(run(main))
