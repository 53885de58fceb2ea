"""Where a run's model comes from, as its bundle will tell: `run.json` without the folders of this machine."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from encoding.bundle import Provenance
from training.errors import RunError

__all__ = ["origin"]

LEARNT_LATER = ("scores", "parity", "graphs")


def origin(run: Path) -> tuple[Provenance, Path]:
    """A finished run's provenance, scores and parity still empty, and the path of its parent. Raises RunError."""
    path = run / "run.json"
    names = [name for name in Provenance.model_fields if name not in LEARNT_LATER]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        parent = Path(content["recipe"]["encoder"])
        known = {name: content[name] for name in names} | {"recipe": _names_only(content["recipe"])}
        return Provenance.model_validate_json(json.dumps(known | {name: {} for name in LEARNT_LATER})), parent
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
        raise RunError(f"{path} does not tell where the model comes from ({reason}); train again") from error


def _names_only(value: Any) -> Any:
    """A recipe in which a local path is only its last part."""
    if isinstance(value, dict):
        return {key: _names_only(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_names_only(item) for item in value]
    local = isinstance(value, str) and "/" in value and (Path(value).exists() or value.startswith(("/", ".", "~")))
    return Path(value).name if local else value
