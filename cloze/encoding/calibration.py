"""Calibration: what a cosine of a bundle's vectors means, learnt from pairs that people have judged.

`calibration.json` has one curve for each precision of the bundle. A curve is a non-decreasing function of the cosine,
linear between its points and constant outside them. Its values are scores on the scale of the judged pairs, or
probabilities that two texts mean the same.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cloze.encoding.errors import BundleError

CALIBRATION_FILE: Final = "calibration.json"

Meaning = Literal["score", "probability"]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Curve(_Record):
    """Points of the curve, and how it was found.

    `error_before` and `error` are expected calibration errors on pairs that the curve was not fitted to, before and
    after, as shares of the scale, and `bins_before` and `bins` what they are the errors of: the mean value and the mean
    judgement of each bin. `thresholds` are values, by what they are best for: "F1", or "precision 0.95".
    """

    method: Literal["isotonic", "platt"]
    cosines: tuple[Finite, ...] = Field(min_length=2)
    values: tuple[Finite, ...] = Field(min_length=2)
    error_before: Finite
    error: Finite
    bins_before: tuple[tuple[Finite, Finite], ...] = ()
    bins: tuple[tuple[Finite, Finite], ...] = ()
    thresholds: dict[str, Finite] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        rising = all(lower < higher for lower, higher in pairwise(self.cosines))
        if len(self.cosines) != len(self.values) or not rising or list(self.values) != sorted(self.values):
            raise ValueError("the points of a curve have rising cosines, and as many values that do not fall")
        return self

    def __call__(self, cosines: NDArray[np.floating] | float) -> NDArray[np.float64]:
        """Return the values of cosines, in the same shape."""
        return np.asarray(np.interp(cosines, self.cosines, self.values))


class Calibration(_Record):
    """`calibration.json`: the curves by precision, and the pairs that they were fitted to."""

    meaning: Meaning
    lowest: Finite  # of the scale
    highest: Finite
    pairs: int
    source: str  # name of the file of pairs
    curves: dict[str, Curve]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises BundleError."""
        path = folder / CALIBRATION_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise BundleError(f"{path} is not a calibration ({reason}); make it again: `cloze calibrate`") from error
