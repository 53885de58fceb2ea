"""cloze head BUNDLE --train FILE --name NAME: learn a classifier on the bundle's vectors from labelled texts."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg

from cloze.command import run
from cloze.encoding.bundle import load_to_change
from cloze.encoding.errors import OptionError
from cloze.encoding.heads import HEAD_FOLDER, HEAD_NAME
from cloze.options import Options


class HeadOptions(Options):
    """Train a classifier head on labelled texts, and add it to the bundle."""

    bundle: CliPositionalArg[Path] = Field(
        description="folder of the bundle; a file and a section of the model card are added to it"
    )
    name: str = Field(pattern=f"^{HEAD_NAME}$", description="name of the head, in requests and in the bundle")
    train: Path | None = Field(None, description="csv, tsv, jsonl or parquet with the columns text and label")
    separator: str = Field(
        "", description="separator between the labels of a text; without it, each text has one label"
    )
    balanced: bool = Field(False, description="give rare labels as much weight as frequent ones")
    wanted_accuracy: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.95,
        description="find the threshold above which predictions have this accuracy, for requests that let the head "
        "abstain",
    )
    remove: bool = Field(False, description="remove the head from the bundle instead")

    @model_validator(mode="after")
    def _one_task(self) -> Self:
        if (self.train is None) != self.remove:
            raise ValueError("give either --train, to learn the head, or --remove, to delete it")
        return self


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = HeadOptions.parse(arguments, "cloze head")

    # torch takes seconds to load; help and option errors need not wait
    from cloze.training.evaluation.classifiers import KEPT, learn_head, write

    bundle = load_to_change(options.bundle)
    heads = bundle.heads
    if options.remove:
        if heads.pop(options.name, None) is None:
            raise OptionError(f"{bundle.path} has no head {options.name!r}; it has {', '.join(heads) or 'none'}")
    else:
        assert options.train is not None
        heads[options.name] = learn_head(
            bundle, options.train, options.separator, balanced=options.balanced, wanted=options.wanted_accuracy
        )
    write(bundle, heads)
    file = bundle.path / HEAD_FOLDER / f"{options.name}.json"
    if (head := heads.get(options.name)) is None:
        print(f"{file}: removed")
        return
    figures = "; ".join(f"{name} {value:.3f}" for name, value in head.figures.items() if name != KEPT)
    if head.threshold is not None:
        figures += (
            f"; {head.figures[KEPT]:.0%} of the answers have a probability of {head.threshold:.4g} or more, and "
            f"at least {options.wanted_accuracy:.0%} of these are right"
        )
    print(f"{file}: {len(head.labels)} labels, {head.texts} texts; held out: {figures}")


if __name__ == "__main__":
    sys.exit(run(main))
