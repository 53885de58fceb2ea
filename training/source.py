"""What a path means to the commands that read one: a finished run, a bundle, or an encoder of any origin."""

from pathlib import Path
from typing import Literal, TypeAlias

from encoding.bundle import SPEC_FILE
from training.errors import RunError

__all__ = ["Kind", "looks_local", "model_folder", "resolve"]

Kind: TypeAlias = Literal["run", "bundle", "encoder"]


def resolve(source: str) -> Kind:
    """Tell a run folder from a bundle from an encoder; a name that is no folder is a hub name, so an encoder.

    Raises RunError for a run that is not finished and for a folder or file that is none of these.
    """
    path = Path(source)
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


def looks_local(source: str) -> bool:
    """Whether this can be no hub name, which is NAME or OWNER/NAME."""
    path = Path(source)
    return path.exists() or path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1


def model_folder(source: str) -> str:
    """Where the weights of a run or an encoder are. Raises RunError for a bundle, which has graphs alone."""
    kind = resolve(source)
    if kind == "bundle":
        raise RunError(f"{source} is a bundle, its template is fixed; give the run or encoder it came from")
    return str(Path(source, "model")) if kind == "run" else source
