"""A bundle's README.md and its provenance: the model card in the hub's format, made from a run's `run.json`.

The provenance does not name any folder of the machine that trained. A model that sentence-transformers trained has no
such file, so only its name is known.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load
from pydantic import ValidationError
from yaml import YAMLError  # type: ignore[import-untyped]

from cloze.encoding.bundle import GRAPHS, Bundle, EmbeddingConfig, Precision, Provenance, locate
from cloze.encoding.template import PoolingMode
from cloze.options import flag
from cloze.training.encoder_source import kind_of
from cloze.training.errors import RunError
from cloze.training.hub.sentence_transformer import is_sentence_transformer
from cloze.training.run_folder import ADAPTED, UNTRAINED, Run

OUTSIDE = "sentence-transformers"  # the method of a model that was not trained by Cloze

MEASURED_LATER = ("scores", "parity", "graphs")

PLACES: Final[dict[PoolingMode, str]] = {
    "mask": "at `[MASK]`",
    "cls": "at the first token",
    "mean": "as the mean over all tokens",
    "max": "as the maximum over all tokens",
    "lasttoken": "at the last token",
    "weightedmean": "as the mean over all tokens, each weighted by its place",
    "mean_sqrt_len_tokens": "as the sum over all tokens, divided by the square root of their number",
}


def provenance_of(run: Path) -> tuple[Provenance, Path]:
    """The provenance of a finished run or of a bundle, without scores and parity, and the path of its parent.

    Raises RunError, BundleError.
    """
    if kind_of(str(run)) == "bundle":
        bundle = Bundle.load(run)
        return bundle.spec.provenance.model_copy(update={name: {} for name in MEASURED_LATER}), bundle.path
    if is_sentence_transformer(run):
        return provenance_of_others(str(run), "export"), run
    names = [name for name in Provenance.model_fields if name not in MEASURED_LATER]
    try:
        content = Run(run).provenance()
        parent = locate(content["recipe"]["encoder"])
        fields = {name: content[name] for name in names} | {"recipe": _names_only(content["recipe"])}
        return Provenance.model_validate_json(json.dumps(fields | {name: {} for name in MEASURED_LATER})), parent
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
        raise RunError(
            f"{Run(run).provenance_file} does not say where the model comes from ({reason}); train again"
        ) from error


def provenance_of_others(source: str, command: str) -> Provenance:
    """The provenance of a model that sentence-transformers saved (a folder or a hub name), exported by `command`."""
    name = Path(os.path.abspath(source)).name if Path(source).is_dir() else source  # a link keeps its own name
    recipe = {"method": OUTSIDE, "encoder": name, "command": command}
    return Provenance(parent=name, recipe=recipe, data=[], commit=None, seeds=[], scores={}, parity={}, graphs={})


def _names_only(value: Any) -> Any:
    """A recipe with only the last part of every local path."""
    if isinstance(value, dict):
        return {key: _names_only(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_names_only(item) for item in value]
    if not isinstance(value, str) or "/" not in value:
        return value
    try:
        local = value.startswith(("/", ".", "~")) or Path(value).exists()
    except OSError:  # a long text with a slash is not a path
        local = False
    return Path(value).name if local else value


def model_card(
    name: str,
    config: EmbeddingConfig,
    provenance: Provenance,
    sizes: Mapping[Precision, int],
    licence: str | None = None,
    inherited: bool = False,
    notes: str = "",
    language: str | list[str] | None = None,
    library: str = "cloze",
    parts: Sequence[str] = (),
) -> str:
    """Markdown with YAML front matter. The section `Figures` is empty; `notes` follow it.

    `sizes` are the bytes of the graphs in the bundle, by precision. `inherited` means that the licence is from the
    parent's card. `licence`, `language` and `library` (its `library_name`) are for the hub. `parts` are sentences about
    what a graph has besides backbone and pooling.
    """
    about = {"license": licence, "language": language, "library_name": library}
    sections = [
        front_matter(provenance, about),
        f"# {name}\n\n{_summary(config, provenance, parts)}",
        f"## Use\n\n{_use(config)}",
        "## Figures",
        notes.strip(),
        f"## Files\n\n{_files(sizes, provenance)}",
        f"## Training\n\n{_training(provenance)}",
        f"## Make it again\n\n{_commands(list(sizes), config, provenance)}",
        f"## Licence\n\n{_licence(provenance, licence, inherited)}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def parent_metadata(parent: Path, key: str) -> Any:
    """The value of a key, such as `license`, in the card of a local parent; None if it has none."""
    try:
        metadata = metadata_load(parent / "README.md")
    except (OSError, ValueError, YAMLError):
        return None
    return (metadata or {}).get(key)


def front_matter(provenance: Provenance, about: Mapping[str, Any]) -> str:
    """The metadata that the hub reads."""
    hub_name = provenance.parent.count("/") == 1
    data = ModelCardData(
        base_model=provenance.parent if hub_name else None,
        pipeline_tag="sentence-similarity",
        tags=["sentence-similarity", "feature-extraction", "onnx", "cloze"],
        **about,
    )
    return f"---\n{data.to_yaml()}\n---"


def _summary(config: EmbeddingConfig, provenance: Provenance, parts: Sequence[str]) -> str:
    rules = [f"The vector is read {PLACES[config.pooling]}, after at most {config.max_tokens} tokens."]
    if config.final_period:
        rules.append("A text without closing punctuation is given a period.")
    if config.denoising:
        rules.append("The vector of the template alone, at the text's length, is taken off.")
    rules += parts
    return (
        f"Sentence vectors, made from {provenance.parent} and exported to ONNX by Cloze. Cosine similarity compares "
        f"them; the graph does not normalise.\n\nEach text is put into the template\n\n    {config.template}\n\n"
        f"with the text at `[X]`. {' '.join(rules)} `embedding.json` says the same to a program."
    )


def _use(config: EmbeddingConfig) -> str:
    prompts = "".join(f"\n- `{name}`: `{template}`" for name, template in config.templates.items())
    named = f" By `prompt_name`, a text gets another template:\n{prompts}" if prompts else ""
    return (
        "```sh\n"
        "cloze serve FOLDER\n"
        "curl -s 127.0.0.1:8080/embed -H 'content-type: application/json' -d '{\"inputs\": \"A first text.\"}'\n"
        "```\n\n"
        "Without a server:\n\n"
        "```python\n"
        "import cloze\n\n"
        'vectors = cloze.load("FOLDER").embed(["A first text."])  # a row of length 1 for each text\n'
        "```\n\n"
        f"Both put each text into the template.{named}"
    )


def _files(sizes: Mapping[Precision, int], provenance: Provenance) -> str:
    rows = ["| file | precision | size | graph | difference from torch |", "| --- | --- | --- | --- | --- |"]
    for precision, size in sizes.items():
        description = provenance.graphs.get(precision, "")
        parity = provenance.parity[precision]
        rows.append(f"| `{GRAPHS[precision]}` | {precision} | {size / 1e6:.1f} MB | {description} | {parity:.1e} |")
    return "\n".join(rows) + "\n\nThe difference is the largest of any component, relative to the longest vector."


def _training(provenance: Provenance) -> str:
    if provenance.recipe.get("method") == OUTSIDE:
        return "Trained by sentence-transformers. Cloze does not know the text and the settings."
    weights = provenance.recipe.get("token_weights")
    counted = f"\n\n{_token_weights(weights)}" if weights else ""
    rows = ["| text | sentences | sha256 |", "| --- | ---: | --- |"]
    rows += [f"| {source.name} | {source.sentences:,} | `{source.sha256[:16]}…` |" for source in provenance.data]
    commit = f" at commit `{provenance.commit[:12]}`" if provenance.commit else ""
    if provenance.recipe.get("method") == ADAPTED:
        before = " These figures are of the model before its tokens were weighed." if weights else ""
        trained = f"Trained with Cloze{commit}, seed {provenance.seeds[0]}. {_adapted(provenance)}{before}"
        return "\n".join(rows) + f"\n\n{trained}{counted}"
    table, recipes = "\n".join(rows), _recipes(provenance)
    if not recipes:
        return f"{table}\n\n{provenance.parent} was not trained further.{counted}"
    blocks = "\n\n".join(map(_recipe, recipes))
    manner = "by the recipe" if len(recipes) == 1 else "as the mean of the weights of runs by these recipes"
    shares = "" if len(recipes) == 1 else f"\n\nTheir shares: {_shares(provenance)}."
    if parent_share := provenance.recipe.get("parent_share"):
        shares += f"\n\nThe weights are {1 - parent_share:g} of the trained ones and {parent_share:g} of the parent's."
    seeds = ", ".join(map(str, provenance.seeds))
    return f"{table}\n\nTrained with Cloze{commit}, seed {seeds}, {manner}\n\n{blocks}{shares}{counted}"


def _recipe(recipe: Mapping[str, Any]) -> str:
    """A recipe as in its file. For a run of `adapt`, which has no recipe, the command."""
    if recipe.get("method") == ADAPTED:
        return f"```sh\n{_adapt_command(recipe, 'RUN')}\n```"
    return "```toml\n" + "\n".join(f"{key} = {_toml(value)}" for key, value in recipe.items()) + "\n```"


def _adapt_command(recipe: Mapping[str, Any], out: str) -> str:
    names = ("pairs", "columns", "documents", "document_columns")
    flags = [f" {flag(name)} {' '.join(recipe[name])}" for name in names if recipe[name]]
    return f"cloze adapt --encoder {recipe['encoder']}{''.join(flags)} --seed {recipe['seed']} --out {out}"


def _adapted(provenance: Provenance) -> str:
    """The results of `adapt` on its held-out queries."""
    figures, share = provenance.recipe["held_out"], provenance.recipe["parent_share"]
    queries = "queries that were held out" if provenance.recipe["pairs"] else "queries made of documents, and held out"
    ranked = f"On {figures['queries']} {queries}, nDCG@10 was {figures['before']:.1f} with {provenance.parent}"
    if share == 1:
        return f"{ranked}, and not surely more after training: the weights are the parent's."
    low, high = figures["interval"]
    gain = figures["after"] - figures["before"]
    return (
        f"{ranked} and {figures['after']:.1f} after training ({gain:+.1f}, 95 % interval {low:+.1f} to {high:+.1f}). "
        f"The weights are {1 - share:g} of the trained ones and {share:g} of the parent's."
    )


def _token_weights(weights: Mapping[str, Any]) -> str:
    files = ", ".join(weights["corpus"])
    a = f"{weights['smoothing']:g}"
    return f"In the mean, a token that makes up the share p of {files} has the weight {a} / ({a} + p), a special one 1."


def _recipes(provenance: Provenance) -> list[dict[str, Any]]:
    """The recipe of the run, or the recipes of the averaged runs; none if nothing was trained."""
    if provenance.recipe.get("method") == UNTRAINED:
        return []
    own = {key: value for key, value in provenance.recipe.items() if key != "token_weights"}
    runs: list[dict[str, Any]] = own.get("runs") or [own]
    return runs


def _shares(provenance: Provenance) -> str:
    return " ".join(f"{weight:g}" for weight in provenance.recipe["weights"])


def _commands(precisions: list[str], config: EmbeddingConfig, provenance: Provenance) -> str:
    served = next(iter(_recipes(provenance)), {})
    denoise = " --denoise" if config.denoising else " --no-denoise" if served.get("mode") == "supervised" else ""
    period = ""
    if config.final_period != served.get("final_period", False):
        period = " --final-period" if config.final_period else " --no-final-period"
    calibrate = " --calibrate TEXTS" if "fitted to" in provenance.graphs.get("int8", "") else ""
    paths = "Replace the names of files and models by the paths of your copies. Then run"
    commands: list[str] = []
    exported = provenance.recipe.get("command", "export").removeprefix("training.")  # the form until version 0.2
    if provenance.recipe.get("method") == OUTSIDE:
        before = "With the model that sentence-transformers saved in `RUN`"
    elif provenance.recipe.get("method") == ADAPTED:
        before = paths.removesuffix(" Then run") + " Run"
        commands = [_adapt_command(provenance.recipe, "RUN")]
    elif provenance.recipe.get("method") == UNTRAINED:
        before = f"With {provenance.parent} in `RUN`"
    elif provenance.recipe.get("method") == "average":
        before = f"Save the recipes above as `recipe-1.toml` and so on. {paths}"
        runs = {f"RUN-{number}": recipe for number, recipe in enumerate(_recipes(provenance), 1)}
        commands = [
            _adapt_command(recipe, run)
            if recipe.get("method") == ADAPTED
            else f"cloze fit recipe-{run.removeprefix('RUN-')}.toml --out {run}"
            for run, recipe in runs.items()
        ]
        averaged = " ".join(runs)
        parent = f" --parent-share {parent_share:g}" if (parent_share := provenance.recipe.get("parent_share")) else ""
        if (encoder := provenance.recipe["encoder"]) != provenance.recipe["runs"][0]["encoder"]:
            parent += f" --parent {encoder}"
        commands.append(f"cloze average {averaged} --out RUN --weights {_shares(provenance)}{parent}")
    else:
        before = f"Save the recipe above as `recipe.toml`. {paths}"
        commands = ["cloze fit recipe.toml --out RUN"]
    run = "RUN"
    if weights := provenance.recipe.get("token_weights"):
        columns = f" --columns {' '.join(weights['columns'])}" if weights["columns"] else ""
        corpus, run = " ".join(weights["corpus"]), "WEIGHED"
        commands.append(f"cloze weigh RUN --corpus {corpus}{columns} --smoothing {weights['smoothing']:g} --out {run}")
    commands += [
        f"cloze {exported} {run} OUT --precision {','.join(precisions)} "
        f"--max-tokens {config.max_tokens}{denoise}{period}{calibrate} --data DATA",
        "cloze evaluate OUT --data DATA",
    ]
    shown = "\n".join(commands)
    return f"{before}:\n\n```sh\n{shown}\n```"


def _licence(provenance: Provenance, licence: str | None, inherited: bool) -> str:
    if licence is None:
        return f"Not stated. It depends on that of {provenance.parent} and of the training text."
    parent = f"as its parent {provenance.parent}" if inherited else f"made from {provenance.parent}"
    return f"{licence}, {parent}. The training text has terms of its own."


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # TOML writes strings, numbers, booleans and lists in the same way
