"""What a run reads besides its text (models, dev data and others), each with a digest that a resumed run compares.

A hub name stands for the commit that is in the cache.
"""

import hashlib
from pathlib import Path
from typing import Any, Final

from huggingface_hub import try_to_load_from_cache

from cloze.encoding.bundle import SPEC_FILE, Bundle, EmbeddingConfig, sha256
from cloze.encoding.calibration import CALIBRATION_FILE
from cloze.encoding.heads import HEAD_FOLDER
from cloze.training.data.corpus import files_of
from cloze.training.encoder_source import FOLDER_DIGEST, encoder_folder
from cloze.training.recipes.recipe import Recipe

MODELS: Final = ("encoder", "generator", "guide", "teacher")  # keys of recipes
FILES: Final = ("dev", "teacher_vectors")


def digests_of(recipe: Recipe) -> dict[str, str]:
    """The digest of each input, by its key and its name. Raises RunError, BundleError, CorpusError."""
    keys = dict[str, Any](recipe)
    named = [(key, keys[key]) for key in MODELS if keys.get(key)]
    named += [("judges", name) for name in keys.get("judges", ())]
    models = ((key, name, encoder_folder(name)) for key, name in named)
    files = ((key, name, name) for key in FILES for name in keys.get(key, ()))
    documents = (("documents", str(file), str(file)) for name in keys.get("documents", ()) for file in files_of(name))
    return {f"{key} {name}": _digest(place) for key, name, place in (*models, *files, *documents)}


def _digest(place: str) -> str:
    path = Path(place)
    if path.is_file():
        return sha256(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_beside(file.relative_to(path)))
        lines = "\n".join(f"{file.relative_to(path)} {sha256(file)}" for file in files)
        if (path / SPEC_FILE).is_file():
            lines += f"\n{Bundle.load(path).spec.model_dump_json(include={*EmbeddingConfig.model_fields, 'weights'})}"
        return FOLDER_DIGEST + hashlib.sha256(lines.encode()).hexdigest()
    config = try_to_load_from_cache(place, "config.json")
    return Path(config).parent.name if isinstance(config, str) else ""


def _is_beside(file: Path) -> bool:
    """Whether a file of a model's folder does not affect vectors: hidden files, cards, what `cloze head` etc. add.

    A bundle's contract changes with these files; its vector space does not.
    """
    added = file.parts[0] == HEAD_FOLDER or file.name in (CALIBRATION_FILE, SPEC_FILE)
    return added or file.suffix in (".md", ".svg") or any(part.startswith(".") for part in file.parts)
