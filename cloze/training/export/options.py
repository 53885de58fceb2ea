"""The options of the commands that write a bundle of a model, without torch."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from cloze.encoding.bundle import PRECISIONS, Precision
from cloze.options import Options


class BundleOptions(Options):
    """The options of every command that writes a bundle."""

    precision: str = Field("fp32", description="graphs to make, separated by commas: fp32, fp16, int8")
    max_tokens: Annotated[int, Field(ge=3)] | None = Field(
        None, description="maximum number of tokens of a sequence, template included"
    )
    data: Path | None = Field(
        None,
        description="score the graphs on this folder, which contains senteval/downstream and, for search, "
        "retrieval/NAME",
    )
    calibrate: Path | None = Field(
        None,
        description="calibration texts for the int8 graph, one per line, for a model that random tokens calibrate "
        "badly",
    )
    force: bool = Field(
        False,
        description="write fp16 and int8 graphs even if their vectors are far from the model's, or their scores on "
        "--data are lower",
    )
    licence: str | None = Field(
        None, alias="license", description="licence of the model (default: the one on its parent's model card)"
    )
    notes: Path | None = Field(None, description="Markdown file to add to the model card")

    @field_validator("precision")
    @classmethod
    def _known(cls, value: str) -> str:
        for name in value.split(","):
            if name not in PRECISIONS:
                raise PydanticCustomError(
                    "precision", "{name} is not one of {known}", {"name": repr(name), "known": ", ".join(PRECISIONS)}
                )
        return value

    @property
    def precisions(self) -> list[Precision]:
        return [name for name in PRECISIONS if name in self.precision.split(",")]
