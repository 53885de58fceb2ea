"""A bridge: a map from the vector space of a new model to that of an old one, whose vectors an index holds.

One file in numpy's format .npz: `matrix`, float32 (new dimension, old dimension), `offset`, float32 (old dimension),
and `about`, the bytes of a JSON object. A unit vector x of the new model becomes x · matrix + offset.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal, Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from cloze.encoding.errors import ClozeError
from cloze.encoding.files import replacing

BridgeKind = Literal["orthogonal", "affine"]
Space = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Share = Annotated[float, Field(ge=0, le=1)]
UNIT: Final = 2.0**22  # components of unit vectors are rounded to multiples of 1 / UNIT,
STEP: Final = 2.0**20  # the matrix to multiples of 1 / STEP, so that sums below 2^11 fit into the 53 bits of a float64
REMAKE: Final = "make it again with `cloze bridge OLD NEW OUT --texts T`"


class BridgeError(ClozeError):
    """A bridge cannot be read, or does not fit the model."""


class About(BaseModel):
    """The two spaces, and recall@10 of the old model's own results on texts held out, with its 95 % interval."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format_version: Literal[1] = 1
    kind: BridgeKind
    old: Space
    new: Space
    fitted: Annotated[int, Field(ge=1)]  # texts
    queries: Annotated[int, Field(ge=1)]  # held-out texts, which measure the recall
    searched: Annotated[int, Field(ge=1)]  # texts that they search
    recall: Share
    least: Share
    most: Share


@dataclass(frozen=True, eq=False)
class Bridge:
    """A bridge. `sha256` is the digest of its file, in hex."""

    about: About
    matrix: NDArray[np.float32]
    offset: NDArray[np.float32]
    sha256: str = ""

    def __call__(self, vectors: NDArray[np.floating]) -> NDArray[np.float32]:
        """Vectors (n, new dimension) of any length -> vectors (n, old dimension) in the old space."""
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        units = (vectors / np.where(lengths > 0, lengths, 1) * UNIT).round() / UNIT
        return (units @ self._exact + self.offset).astype(np.float32)

    @cached_property
    def _exact(self) -> NDArray[np.float64]:
        """The matrix, rounded so that its products with rounded units are exact in every batch and on every CPU."""
        return (self.matrix.astype(np.float64) * STEP).round() / STEP

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises BridgeError."""
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
                with np.load(file, allow_pickle=False) as arrays:
                    matrix, offset, about = arrays["matrix"], arrays["offset"], arrays["about"].tobytes()
            bridge = cls(About.model_validate_json(about), matrix, offset, digest)
        except OSError as error:
            raise BridgeError(f"{path} cannot be read ({error.strerror}); name the file of a bridge") from error
        except (AttributeError, BadZipFile, EOFError, KeyError, TypeError, ValidationError, ValueError) as error:
            raise BridgeError(f"{path} is not a bridge that this version of Cloze can read; {REMAKE}") from error
        if matrix.dtype != np.float32 or matrix.ndim != 2 or offset.dtype != np.float32:
            raise BridgeError(f"{path} has a matrix of {matrix.dtype} {matrix.shape}, not float32 (new, old); {REMAKE}")
        if offset.shape != matrix.shape[1:] or not (np.isfinite(matrix).all() and np.isfinite(offset).all()):
            raise BridgeError(
                f"{path} has a matrix and an offset whose shapes do not match, or whose values are not finite; {REMAKE}"
            )
        return bridge

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        about = np.frombuffer(self.about.model_dump_json().encode(), dtype=np.uint8)
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez(file, matrix=self.matrix, offset=self.offset, about=about)
