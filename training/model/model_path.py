"""What a path means to the commands that take one: a finished run, a bundle, or any encoder."""

from pathlib import Path
from typing import Literal, TypeAlias

from encoding.bundle import SPEC_FILE, located
from training.errors import RunError
from training.model.pretrained import looks_local

__all__ = ["Kind", "kind_of", "model_folder"]

Kind: TypeAlias = Literal["run", "bundle", "encoder"]


def kind_of(source: str) -> Kind:
    """Tell a run folder from a bundle from an encoder; a name that is not a folder is a hub name, so an encoder.

    `cloze-mini` is the bundle that comes with Cloze, unless there is a folder so called.
    Raises RunError for a run that is not finished, and for a folder or file that is none of these.
    """
    path = located(source)
    if (path / SPEC_FILE).is_file():
        return "bundle"
    if (path / "run.json").is_file() and (path / "model").is_dir():
        return "run"
    if (path / "recipe.toml").is_file():
        raise RunError(f"{path} is a run that is not finished; continue it: python -m training.fit --resume {path}")
    if (path / "config.json").is_file() and not (path / "onnx").is_dir():
        return "encoder"
    if path.is_dir():
        raise RunError(
            f"{path} is none of: a run (run.json, model/), a bundle ({SPEC_FILE}), an encoder (config.json); "
            "it may be a folder above or below the one that is meant"
        )
    if looks_local(source):
        raise RunError(f"{path} is not a folder; give a run, a bundle, an encoder's folder or a hub name")
    return "encoder"


def model_folder(source: str) -> str:
    """Where the weights of a run, a bundle or an encoder are. Raises RunError."""
    return str(Path(source, "model")) if kind_of(source) == "run" else source
