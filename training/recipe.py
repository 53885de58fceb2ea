"""A recipe: everything that decides a training run, in a small TOML file, checked before anything is loaded.

The keys all methods share are here; a method adds its own in a subclass beside its objective. A table
`[presets.NAME]` has keys that `--preset NAME` lays over those at the top: one recipe serves several backbones.
Command-line `--key value` replaces a key of either. The run folder keeps the resolved recipe.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from encoding.errors import TemplateError
from encoding.template import PoolingMode, Template
from training.errors import RecipeError

__all__ = [
    "LARGEST_SEED",
    "PRESETS",
    "Positive",
    "Recipe",
    "choose_preset",
    "parse_value",
    "read_toml",
    "shipped_recipes",
    "to_toml",
    "validate",
]

PRESETS = "presets"
LARGEST_SEED = 2**31 - 1  # numpy takes twice as much; each process of several adds to it

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Recipe(BaseModel):
    """The keys of every method."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    method: str = Field(description="the objective to train with")
    encoder: str = Field(description="parent encoder: a local folder or a hub name")
    corpus: tuple[str, ...] = Field(
        min_length=1, description="files of text: .txt (one sentence a line), .csv, .tsv, .jsonl; .gz too"
    )
    columns: tuple[str, ...] = Field((), description="columns of a csv, tsv or jsonl corpus to read")
    sentences: Positive | None = Field(None, description="train on a random sample of so many sentences; unset: on all")
    min_words: Positive = Field(1, description="leave out sentences of fewer words")
    max_words: Positive | None = Field(None, description="leave out sentences of more words")
    template: str = Field("[X]", description='words around the text, such as: This sentence of "[X]" means [MASK].')
    pooling: PoolingMode = Field("cls", description="where the vector is read: mask, cls or mean")
    final_period: bool = Field(False, description="give a text without closing punctuation a period")
    max_tokens: Positive = Field(32, description="cut training sequences to so many tokens, template included")
    batch_size: Annotated[int, Field(gt=1)] = Field(64, description="sentences a step, in all processes together")
    group_by_length: bool = Field(False, description="put texts of like length into one batch: less padding, faster")
    neighbours: Positive = Field(1, description="draw so many consecutive texts of the corpus together")
    epochs: Annotated[float, Field(gt=0)] = Field(1.0, description="passes over the corpus")
    max_steps: Positive | None = Field(None, description="stop after so many steps, whatever epochs says")
    learning_rate: Annotated[float, Field(gt=0)] = Field(3e-5, description="AdamW's peak rate, then decayed linearly")
    end_learning_rate: Annotated[float, Field(ge=0)] = Field(0.0, description="the rate to which it is decayed")
    warmup_steps: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        0, description="steps of linear warm-up; below 1: a share of all steps"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's weight decay")
    adam_beta2: Fraction = Field(0.999, description="AdamW's decay of the mean squared gradient")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(1.0, description="clip the gradient's norm")
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32", description="arithmetic of the forward pass: fp32; tf32, on a GPU; or bf16; weights stay fp32"
    )
    compile: bool = Field(
        False, description="compile the encoder with torch.compile: the first steps take minutes, later ones less time"
    )
    dev: str | None = Field(
        None,
        description="scored pairs that choose the best checkpoint: sts-dev.csv, or columns sentence1, sentence2, score",
    )
    dev_retrieval: tuple[str, ...] = Field(
        (),
        description="folders of collections to search, as BEIR lays them out; the checkpoint with the highest mean of "
        "their nDCG@10 and of the dev pairs' correlation is the best",
    )
    eval_steps: Positive = Field(125, description="score the dev data every so many steps; the best weights are kept")
    save_steps: Positive | None = Field(
        None, description="save a checkpoint, from which a killed run goes on, every so many steps; unset: eval_steps"
    )
    patience: Positive | None = Field(
        None, description="stop after so many evaluations in a row without a better dev score; unset: never"
    )
    workers: Annotated[int, Field(ge=0)] = Field(
        0, description="processes that tokenise while a step runs; 0: each batch is tokenised before its step"
    )
    log_steps: Positive = Field(10, description="log the loss every so many steps")
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = Field(
        42, description="seed of the order, the dropout and fresh weights"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        try:
            Template.parse(self.template, self.pooling)
        except TemplateError as error:
            raise ValueError(str(error)) from error
        if self.group_by_length and self.neighbours > 1:
            raise ValueError("group_by_length and neighbours order the corpus in two ways; choose one")
        if self.max_words is not None and self.max_words < self.min_words:
            raise ValueError(f"max_words is {self.max_words} and min_words {self.min_words}; raise max_words")
        if self.end_learning_rate >= self.learning_rate:
            raise ValueError(
                f"end_learning_rate is {self.end_learning_rate} and learning_rate {self.learning_rate}; "
                "the end has to be lower"
            )
        if self.patience is not None and self.dev is None and not self.dev_retrieval:
            raise ValueError(f"patience is {self.patience} and counts dev scores; write dev, or remove patience")
        return self


def shipped_recipes() -> dict[str, str]:
    """Name -> TOML text of the recipes that come with Cloze."""
    folder = files("training") / "recipes"
    found = {
        Path(entry.name).stem: entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return dict(sorted(found.items()))


def read_toml(source: str) -> dict[str, Any]:
    """The keys of a shipped recipe or a TOML file. Raises RecipeError."""
    shipped = shipped_recipes()
    path = Path(source)
    if source in shipped:
        text = shipped[source]
    elif path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe {source}: cannot be read as UTF-8 text ({error})") from error
    else:
        raise RecipeError(f"no recipe {source!r}: neither a file nor one of {', '.join(shipped)}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {source}: not TOML: {error}") from error


def choose_preset(keys: Mapping[str, Any], name: str | None, source: str) -> dict[str, Any]:
    """The keys at the top with those of preset `name` laid over them, and no presets any more. Raises RecipeError."""
    presets = keys.get(PRESETS, {})
    if not (isinstance(presets, dict) and all(isinstance(preset, dict) for preset in presets.values())):
        raise RecipeError(f"recipe {source}: presets is no table of tables; write [presets.NAME] and its keys below")
    if name is not None and name not in presets:
        known = f"its presets are {', '.join(presets)}" if presets else "it has none"
        raise RecipeError(f"recipe {source}: no preset {name!r}; {known}")
    top = {key: value for key, value in keys.items() if key != PRESETS}
    return top | (presets[name] if name else {})


def parse_value(recipe: type[Recipe], key: str, words: list[str]) -> object:
    """Read `--key word …` as the key's TOML value: several words make a list, a word that is no TOML is a string."""
    if "tuple" in str(recipe.model_fields[key].annotation):
        return [_literal(word) for word in words]
    if not words:
        raise RecipeError(f"--{key} takes one value, found none; write --{key} VALUE, or true or false for yes or no")
    if len(words) > 1:
        raise RecipeError(f"--{key} takes one value, found {len(words)}: {' '.join(words)}; put quotes around a text")
    return _literal(words[0]) if recipe.model_fields[key].annotation is not str else words[0]


def validate(recipe: type[Recipe], keys: Mapping[str, object], source: str) -> Recipe:
    """Check every key. Raises RecipeError, which names the first bad key, what was found and what to write."""
    try:
        return recipe.model_validate_json(json.dumps(keys, default=str))  # TOML has dates, which no key takes
    except ValidationError as error:
        first = error.errors()[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        raise RecipeError(f"recipe {source}: {unknown_key(recipe, key)}")
    if first["type"] == "missing":
        raise RecipeError(f"recipe {source}: {key} is not set; write {key}: {recipe.model_fields[key].description}")
    problem = _PROBLEMS.get(first["type"], first["msg"].removeprefix("Value error, "))
    if not key:
        raise RecipeError(f"recipe {source}: {problem}")
    field = recipe.model_fields[key]
    raise RecipeError(f"recipe {source}: {key} is {keys[key]!r}: {problem}; {key} is: {field.description}")


def unknown_key(recipe: type[Recipe], key: str) -> str:
    """The message for a key that the method does not have."""
    close = difflib.get_close_matches(key, recipe.model_fields, 1)
    hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(recipe.model_fields)}"
    return f"unknown key {key!r}; {hint}"


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML, every key written out, unset ones left away."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    # a JSON string, number, boolean or list of these is a TOML value
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


_PROBLEMS = {
    "bool_type": "write true or false",
    "tuple_type": 'write a list, such as ["one", "two"]',
    "finite_number": "write a finite number",
}


def _literal(word: str) -> object:
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word
