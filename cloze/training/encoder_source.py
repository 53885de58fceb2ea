"""What the name of an encoder refers to (a run, a bundle, a folder, a hub name or cloze-mini), and its configuration.

It needs neither torch nor transformers, so that a recipe can use an encoder's template and pooling without loading it.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from pydantic import BaseModel

from cloze.adoption.hub import looks_local
from cloze.adoption.modules import MODULES_FILE, ST_CONFIG_FILE, AdoptionError, pooling_of, templates_of
from cloze.encoding.bundle import SPEC_FILE, locate, upgrade
from cloze.encoding.template import POOLINGS, TEXT
from cloze.training.errors import RunError

RECIPE_FILE: Final = "recipe.toml"  # of a run
PROVENANCE_FILE: Final = "run.json"  # of a finished run
MODEL: Final = "model"  # folder of a run's encoder
CONFIG_FILE: Final = "embedding_config.json"  # of an encoder that Cloze saved
FOLDER_DIGEST: Final = "folder "  # before the digest of a folder's files that decide vectors
CONFIG_FIELDS: Final = ("template", "pooling", "final_period")  # fields of an embedding configuration

Kind: TypeAlias = Literal["run", "bundle", "encoder"]


def kind_of(source: str) -> Kind:
    """Distinguish runs, bundles and encoders. A name that is not a folder is a hub name, and so an encoder.

    `cloze-mini` is the bundle that comes with Cloze, unless there is a folder of that name.
    Raises RunError for a run that is not finished, and for a folder or file that is not one of these.
    """
    path = locate(source)
    if (path / SPEC_FILE).is_file():
        return "bundle"
    if (path / PROVENANCE_FILE).is_file() and (path / MODEL).is_dir():
        return "run"
    if (path / RECIPE_FILE).is_file():
        raise RunError(f"{path} is a run that is not finished; continue it: cloze fit --resume {path}")
    if (path / "config.json").is_file() and (_has_weights(path) or not (path / "onnx").is_dir()):
        return "encoder"
    if path.is_dir():
        raise RunError(
            f"{path} is not a run (run.json, model/), a bundle ({SPEC_FILE}) or an encoder (config.json); check "
            "whether you mean a folder above or below it"
        )
    if looks_local(source):
        raise RunError(f"{path} is not a folder; give a run, a bundle, an encoder's folder or a hub name")
    return "encoder"


def encoder_folder(source: str) -> str:
    """The folder with the weights of a run, a bundle or an encoder. Any other name is returned unchanged.

    Raises RunError for a run that is not finished, and BundleError.
    """
    path = locate(source)
    begun = any((path / name).is_file() for name in (RECIPE_FILE, PROVENANCE_FILE))
    if begun and kind_of(source) == "run":
        return str(path / MODEL)
    return source if path == Path(source) else str(path)


def saved_config(folder: Path) -> Path | None:
    """The file of a saved model's embedding configuration; None if the folder has none."""
    file = folder / CONFIG_FILE
    return file if file.is_file() else None


def own_config(source: str) -> dict[str, Any] | None:
    """The template, the pooling and the final period with which an encoder is served; None if it has no such settings.

    A run, a bundle and a sentence-transformers model have them; a masked language model does not. For a hub name, only
    the few small files with these settings are fetched. Raises RunError, BundleError.
    """
    name = encoder_folder(source)
    folder = Path(name)
    saved = saved_config(folder) or folder / SPEC_FILE
    if saved.is_file():
        fields = _json(saved)
        if not isinstance(fields, dict):
            raise RunError(f"{saved} does not contain a JSON object; restore the folder")
        return {key: value for key, value in upgrade(fields).items() if key in CONFIG_FIELDS}
    return _config_of_modules(folder.joinpath if folder.is_dir() else lambda file: _fetched(name, file))


def keeps_own_config(source: str, given: BaseModel) -> bool:
    """Whether a recipe's template, pooling and final period are those with which the encoder is served by itself.

    Raises RunError, BundleError.
    """
    own = own_config(source) or {}
    return bool(own) and own == given.model_dump(include=set(own))


def of_library(source: str) -> bool:
    """Whether an encoder, a folder or a hub name, was saved by sentence-transformers and is neither run nor bundle."""
    folder = locate(source)
    if saved_config(folder) or (folder / SPEC_FILE).is_file():  # sentence-transformers can load these too
        return False
    file = folder / MODULES_FILE if folder.is_dir() else _fetched(source, MODULES_FILE)
    return file is not None and file.is_file()


def layers_behind(source: str) -> list[str]:
    """The kinds of the layers after the pooling of a sentence-transformers model, without its normalisation."""
    folder = locate(source)
    rows = _json(folder / MODULES_FILE if folder.is_dir() else _fetched(source, MODULES_FILE)) or []
    kinds = [str(row.get("type")).rpartition(".")[2] for row in rows if isinstance(row, dict)]
    behind = kinds[kinds.index("Pooling") + 1 :] if "Pooling" in kinds else []
    return [kind for kind in behind if kind != "Normalize"]


def named_templates(source: str) -> dict[str, str]:
    """A sentence-transformers model's prompts as named templates; none for any other encoder."""
    folder = Path(source)
    file = folder.joinpath if folder.is_dir() else lambda file: _fetched(source, file)
    config = _json(file(ST_CONFIG_FILE)) or {}
    try:
        return templates_of(config.get("prompts") or {}, config.get("default_prompt_name"), source)[1]
    except AdoptionError:  # a prompt that cannot be a template; adopting the model reports it
        return {}


def learnt_sentences(source: str) -> bool:
    """Whether an encoder was trained for sentences, as far as is known. Only a run of `pretrain` is known not to be."""
    path = locate(source)
    return not (path / PROVENANCE_FILE).is_file() or provenance_in(path)["recipe"]["method"] != "mlm"


def provenance_in(run: Path) -> dict[str, Any]:
    """The contents of run.json. Raises RunError if it is damaged."""
    path = run / PROVENANCE_FILE
    provenance = _json(path)
    try:
        _, _ = provenance["recipe"]["method"], [source["sha256"] for source in provenance["data"]]
    except (LookupError, TypeError) as error:
        raise RunError(f"{path} does not say how {run} was trained; restore the folder") from error
    return dict(provenance)


def _config_of_modules(file: Callable[[str], Path | None]) -> dict[str, Any] | None:
    """The template and the pooling of a sentence-transformers model; `file` finds its files. None for other models."""
    rows = [row for row in _json(file(MODULES_FILE)) or [] if isinstance(row, dict)]  # loading reports other errors
    path = next((row.get("path") for row in rows if str(row.get("type")).endswith("Pooling")), None)
    pooling = _json(file(f"{path}/config.json")) if path else None
    if not pooling:
        return None
    modes = pooling_of(pooling)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        return None
    config = _json(file(ST_CONFIG_FILE)) or {}
    prompt = (config.get("prompts") or {}).get(config.get("default_prompt_name")) or ""
    return {"template": f"{prompt}{TEXT}", "pooling": modes[0], "final_period": False}


@cache
def _fetched(name: str, file: str) -> Path | None:
    """A file of a hub model; None if the model lacks it, or if the hub cannot be reached."""
    from huggingface_hub import hf_hub_download  # here, because most encoders are folders

    try:
        return Path(hf_hub_download(name, file))
    except Exception:  # the model is loaded next, which reports the error
        return None


def _json(path: Path | None) -> Any:
    """A file's contents; None if there is no file."""
    if path is None or not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as JSON ({error}); restore the folder") from error


def _has_weights(folder: Path) -> bool:
    """Whether it has torch weights. A bundle that has lost its contract has only graphs."""
    return any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "pytorch_model*.bin"))
