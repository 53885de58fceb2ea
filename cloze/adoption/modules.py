"""Read the files of a sentence-transformers model: its modules, pooling, prompts and token limit.

Both ways to make a bundle use it: with torch (`cloze.training.hub.adoption`), and from the model's own graph.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from cloze.encoding.bundle import GRAPHS, SPEC_FILE
from cloze.encoding.errors import ClozeError, TemplateError
from cloze.encoding.template import POOLINGS, TEXT, PoolingMode, Template

NEEDS_TORCH: Final = (
    "install the extra `train`: with torch, Cloze converts every model that it can serve: pip install '.[train]' in a "
    "clone of Cloze"
)
MODULES_FILE: Final = "modules.json"  # of sentence-transformers
ST_CONFIG_FILE: Final = "config_sentence_transformers.json"
BEHIND: Final = ("Dense", "LayerNorm", "Normalize")  # modules that may follow the pooling
SERVED: Final = f"Cloze serves a Transformer, a Pooling and then any of {', '.join(BEHIND)}"
DOCUMENT_PROMPTS: Final = ("document", "passage", "corpus")  # encode_document looks for these, in this order
FORMER_POOLINGS: Final = {  # keys of earlier versions of sentence-transformers
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
FROM_TWO: Final = ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl")  # positions start after padding


class AdoptionError(ClozeError):
    """A bundle cannot hold a model of sentence-transformers."""


class Module(NamedTuple):
    """A row of modules.json: the class's name, its folder, and the folder's config.json (None if there is none)."""

    kind: str
    path: str
    config: dict[str, Any] | None


def graph_file(folder: Path, source: str) -> Path:
    """The path of the model's own graph, used to make a bundle without torch. Raises AdoptionError if there is none."""
    path = folder / GRAPHS["fp32"]
    if not path.is_file():
        raise AdoptionError(
            f"{source!r} has no {GRAPHS['fp32']}, from which Cloze makes a bundle without torch; {NEEDS_TORCH}"
        )
    return path


def modules_of(folder: Path, source: str) -> list[Module]:
    """The modules of a model. Raises AdoptionError if a bundle cannot hold one, or if one is the model's own code.

    This includes what sentence-transformers itself would only warn about.
    """
    rows = json_of(folder / MODULES_FILE)
    if not rows and (folder / SPEC_FILE).is_file():
        raise AdoptionError(f"{source!r} is a bundle already; serve it: cloze serve {source}")
    if not rows:
        raise AdoptionError(
            f"{source!r} has no modules.json, so nothing says how its vectors are pooled; give a model that "
            "sentence-transformers saved"
        )
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("type"), str) and isinstance(row.get("path"), str) for row in rows
    ):
        raise AdoptionError(
            f"{source!r}: modules.json does not give a type and a path for each module; get the model again"
        )
    if outside := [row["path"] for row in rows if Path(row["path"]).is_absolute() or ".." in Path(row["path"]).parts]:
        raise AdoptionError(
            f"{source!r}: modules.json names {outside[0]}, which is outside the model's folder; get the model again"
        )
    modules = [Module(row["type"].rpartition(".")[2], row["path"], _config(folder, row["path"])) for row in rows]
    kinds = [module.kind for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or any(kind not in BEHIND for kind in kinds[2:]):
        raise AdoptionError(f"{source!r} has the modules {', '.join(kinds)}; {SERVED}")
    if foreign := [row["type"] for row in rows if not row["type"].startswith("sentence_transformers.")]:
        raise AdoptionError(
            f"{source!r} has the module {foreign[0]}, which is custom code, and Cloze does not run custom code; "
            "choose a model with modules of sentence-transformers only"
        )
    for kind, path, config in modules[1:]:
        if config is None and kind != "Normalize":  # Normalize has no file
            raise AdoptionError(f"{source!r} has no {path}/config.json, which its {kind} needs; get the model again")
        activation = (config or {}).get("activation_function", "torch.") if kind == "Dense" else "torch."
        if not activation.startswith("torch."):
            raise AdoptionError(
                f"{source!r} has the activation function {activation} in {path}, which is custom code; Cloze runs "
                "only those of torch.nn: choose another model"
            )
    return modules


def pooling_of(config: Mapping[str, Any]) -> list[str]:
    """The poolings that a Pooling module concatenates; a bundle has one."""
    former = [mode for key, mode in FORMER_POOLINGS.items() if config.get(key)]
    mode = config.get("pooling_mode")
    return former if mode is None else [mode] if isinstance(mode, str) else list(mode)


def check_pooling(poolings: Sequence[str], include_prompt: bool, source: str) -> PoolingMode:
    """The only pooling of a model. Raises AdoptionError if a bundle cannot hold it."""
    if len(poolings) != 1 or poolings[0] not in POOLINGS:
        raise AdoptionError(
            f"{source!r} concatenates the poolings {' and '.join(poolings)}; a bundle has exactly one of "
            f"{', '.join(POOLINGS[1:])}"
        )
    if not include_prompt:
        raise AdoptionError(
            f"{source!r} has include_prompt: false, so its pooling ignores the tokens of a prompt; a bundle "
            "pools all tokens of the template, so its vectors would differ"
        )
    return cast(PoolingMode, poolings[0])


def check_behind(inputs: Sequence[str], truncate_dim: int | None, source: str) -> None:
    """Check the inputs of the modules after the pooling, and that vectors are not cut. Raises AdoptionError."""
    for read in inputs:
        if read != "sentence_embedding":
            raise AdoptionError(
                f"{source!r} has a Dense module that reads {read}; {SERVED}, all of which read the sentence's vector"
            )
    if truncate_dim is not None:
        raise AdoptionError(
            f"{source!r} has truncate_dim {truncate_dim}; remove it from config_sentence_transformers.json, and "
            "ask the service for that many `dimensions`"
        )


def templates_of(prompts: Mapping[str, str], default: str | None, source: str) -> tuple[str, dict[str, str]]:
    """The template and the named templates that correspond to a model's prompts. Raises AdoptionError."""
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in filter(None, prompts.values())):
        raise AdoptionError(
            f"{source!r}: the prompts in {ST_CONFIG_FILE} are not an object of names and texts; get the file again"
        )
    templates = {name: _template(name, prompt, source) for name, prompt in prompts.items() if prompt}
    template = templates.get(default or "", TEXT)
    for name in DOCUMENT_PROMPTS[1:]:
        if name in templates:
            templates.setdefault(DOCUMENT_PROMPTS[0], templates[name])
    if template != TEXT:  # otherwise an empty prompt would get the default template
        templates = dict.fromkeys([*prompts, DOCUMENT_PROMPTS[0]], TEXT) | templates
    return template, templates


def limit_of(folder: Path) -> tuple[int, int]:
    """The longest sequence that a model reads, and the longest that it has positions for, in tokens."""
    config = json_of(folder / "config.json") or {}
    padding = config.get("pad_token_id")
    first = (1 if padding is None else padding) + 1 if config.get("model_type") in FROM_TWO else 0
    largest = int(config.get("max_position_embeddings") or 2**31) - first
    limit = settings_of(folder).get("max_seq_length")
    limit = limit or (json_of(folder / "tokenizer_config.json") or {}).get("model_max_length") or largest
    return min(int(limit), largest), largest


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings of the first module, from sentence_bert_config.json or a file with an earlier name."""
    file = next(iter(sorted(folder.glob("sentence_*_config.json"))), None)
    return (json_of(file) if file else None) or {}


def json_of(path: Path) -> Any:
    """The contents of a JSON file; None if there is none. Raises AdoptionError."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdoptionError(f"{path} cannot be read as JSON ({error}); get the model again") from error


def _config(folder: Path, path: str) -> dict[str, Any] | None:
    config: dict[str, Any] | None = json_of(folder / path / "config.json")
    return config


def _template(name: str, prompt: str, source: str) -> str:
    try:
        return str(Template.parse(f"{prompt}{TEXT}", "mean"))
    except TemplateError as error:
        raise AdoptionError(f"{source!r}: its prompt {name} cannot be a template: {error}") from error
