"""The provenance of a bundle: `run.json` without the folders of the machine that trained.

sentence-transformers writes no such file: what it trained has only a name.
"""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from encoding.bundle import Provenance, located
from training.errors import RunError
from training.hub.sentence_transformer import is_sentence_transformer
from training.run_folder import Run

__all__ = ["OUTSIDE", "provenance_of", "provenance_of_others"]

OUTSIDE = "sentence-transformers"  # the method of a model that was not trained by Cloze

MEASURED_LATER = ("scores", "parity", "graphs")


def provenance_of(run: Path) -> tuple[Provenance, Path]:
    """A finished run's provenance without scores and parity, and the path of its parent. Raises RunError."""
    if is_sentence_transformer(run):
        return provenance_of_others(str(run), "training.export"), run
    names = [name for name in Provenance.model_fields if name not in MEASURED_LATER]
    try:
        content = Run(run).provenance()
        parent = located(content["recipe"]["encoder"])
        known = {name: content[name] for name in names} | {"recipe": _names_only(content["recipe"])}
        return Provenance.model_validate_json(json.dumps(known | {name: {} for name in MEASURED_LATER})), parent
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
        raise RunError(
            f"{Run(run).provenance_file} does not say where the model comes from ({reason}); train again"
        ) from error


def provenance_of_others(source: str, command: str) -> Provenance:
    """The provenance of a model that sentence-transformers saved, a folder or a hub name, and that `command` reads."""
    name = Path(os.path.abspath(source)).name if Path(source).is_dir() else source  # of a link: its own
    recipe = {"method": OUTSIDE, "encoder": name, "command": command}
    return Provenance(parent=name, recipe=recipe, data=[], commit=None, seeds=[], scores={}, parity={}, graphs={})


def _names_only(value: Any) -> Any:
    """A recipe with only the last part of every local path."""
    if isinstance(value, dict):
        return {key: _names_only(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_names_only(item) for item in value]
    local = isinstance(value, str) and "/" in value and (Path(value).exists() or value.startswith(("/", ".", "~")))
    return Path(value).name if local else value
