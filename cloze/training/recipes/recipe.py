"""A recipe: everything that decides a training run, in a small TOML file, checked before anything is loaded.

The keys that all methods share are here; a method adds its own in a subclass in `methods`. With `--preset NAME`, the
keys of the table `[presets.NAME]` replace those at the top, so that one recipe serves several backbones. On the command
line, `--key-name value` replaces a key of either. The run folder keeps the resolved recipe. Errors name the key and say
what to write.
"""

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from glob import has_magic
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from cloze.encoding.bundle import DEFAULT
from cloze.encoding.errors import TemplateError
from cloze.encoding.template import PoolingMode, Template
from cloze.training.errors import RecipeError

LARGEST_EPOCHS = 1e6
LARGEST_SEED = 2**31 - 1  # numpy accepts twice as much; each of several processes adds to it

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

PRESETS = "presets"
FORMER: Final = {"dev_retrieval": "dev"}  # keys of earlier versions -> those that replace them
RETIRED: Final = {  # keys of earlier versions -> the only value left
    "cosine_weight": 5.0,
    "depth": 30,
    "divergence_weight": 1.0,
    "end_learning_rate": 0.0,
    "max_grad_norm": 1.0,
    "spread_weight": 0.0,
    "whole_words": False,
}


class Recipe(BaseModel):
    """The keys of every method."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    readable_columns: ClassVar[Sequence[int]] = (1,)  # how many columns a row may have

    method: str = Field(description="the training method")
    encoder: str = Field(
        DEFAULT, description="encoder to start from, the parent: a run, a bundle, a folder, a hub name, or cloze-mini"
    )
    corpus: tuple[str, ...] = Field(
        min_length=1,
        description="text files, or glob patterns such as 'data/*.jsonl': .txt (one sentence per line), .csv, .tsv, "
        ".jsonl, .parquet; all but .parquet also with .gz, .bz2, .xz or .zst",
    )
    weights: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="sampling weight of each file; unset: proportional to its number of sentences"
    )
    columns: tuple[str, ...] = Field((), description="columns to read from a csv, tsv, jsonl or parquet corpus")
    sentences: Positive | None = Field(None, description="train on a random sample of this many sentences; unset: all")
    min_words: Positive = Field(1, description="skip sentences with fewer words")
    max_words: Positive | None = Field(None, description="skip sentences with more words; unset: no limit")
    template: str = Field(
        "[X]",
        description='prompt template with [X] for the text, such as: This sentence of "[X]" means [MASK].; unset: '
        "that of the encoder if it has its own, as cloze-mini does",
    )
    pooling: PoolingMode = Field(
        "cls",
        description="pooling of the vector: mask, cls, mean, max, lasttoken, weightedmean or mean_sqrt_len_tokens; "
        "unset: that of the encoder if it has its own",
    )
    final_period: bool = Field(False, description="add a period to a text that lacks closing punctuation")
    max_tokens: Positive = Field(32, description="truncate training sequences to this many tokens, template included")
    batch_size: Annotated[int, Field(gt=1)] = Field(64, description="sentences per step, summed over all processes")
    group_by_length: bool = Field(False, description="batch texts of similar length together: less padding, faster")
    epochs: Annotated[float, Field(gt=0, le=LARGEST_EPOCHS)] = Field(
        1.0, description="passes over the corpus; the last, incomplete batch of each is dropped"
    )
    max_steps: Positive | None = Field(
        None, description="train for this many steps, regardless of epochs; unset: epochs decides"
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        3e-5, description="AdamW's peak learning rate, which decays linearly to 0"
    )
    warmup_steps: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        0, description="steps of linear warm-up; below 1: a fraction of all steps"
    )
    lora_rank: Annotated[int, Field(ge=0)] = Field(
        0,
        description="LoRA: rank of the matrices that are trained beside each linear layer of the encoder; 0: no "
        "LoRA, train all weights",
    )
    lora_alpha: Positive = Field(16, description="LoRA: the matrices are scaled by lora_alpha / lora_rank")
    frozen_layers: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="freeze the embeddings and this many first layers, for cheaper steps; 0: freeze the embeddings "
        "only; unset: freeze nothing",
    )
    frozen_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="fraction of the steps after which the frozen_layers are unfrozen; 1: never; the embeddings stay "
        "frozen",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's weight decay")
    adam_beta2: Fraction = Field(0.999, description="AdamW's beta2, the decay rate of the mean squared gradient")
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        "auto",
        description="precision of the forward pass; auto: bf16 on a GPU that supports it, else fp32; the weights "
        "stay fp32",
    )
    compile: bool = Field(
        False,
        description="compile the encoder, and the other models of the method, with torch.compile: the first steps "
        "take minutes, later ones are faster",
    )
    dev: tuple[str, ...] = Field(
        (),
        description="dev sets that choose the best checkpoint, as files or folders: pairs with a score or a label, "
        "triplets, collections to search",
    )
    dev_choice: Literal["mean", "least_gain"] = Field(
        "mean",
        description="how several dev sets choose the checkpoint: mean, by their mean score; least_gain, by the "
        "smallest gain of any set over the encoder before training",
    )
    held_out: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="rows of the corpus to hold out of training; without dev, the checkpoint with the lowest loss on "
        "them is chosen; rows equal to one of them are dropped; 0: none; unset: none with dev, else 5 % of the "
        "corpus, at most 1,000 rows, in full batches",
    )
    eval_steps: Positive = Field(
        125,
        description="steps between evaluations on the dev sets or the held-out rows; the last step is evaluated too, "
        "and the best weights are kept",
    )
    save_steps: Positive | None = Field(
        None,
        description="steps between checkpoints, from which --resume continues; unset: at the first multiple of "
        "eval_steps at least five minutes after the previous checkpoint",
    )
    patience: Positive | None = Field(
        None, description="stop after this many evaluations in a row without improvement; unset: never"
    )
    workers: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="processes that tokenise the next batches while a step runs; 0: tokenise each batch before its "
        "step; unset: 2 on a GPU, else 0",
    )
    log_steps: Positive = Field(10, description="steps between logged losses")
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "none"], ...] = Field(
        ("none",),
        min_length=1,
        description="where to send the figures of log.jsonl as well: tensorboard (in the run folder), wandb, mlflow, "
        "or none",
    )
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = Field(
        42, description="seed of the data order, the dropout and new weights"
    )

    def steps(self, rows: int) -> int:
        """Optimiser steps of training on a corpus of `rows`; the last, short batch of an epoch is dropped."""
        return self.max_steps or math.ceil(self.epochs * (rows // self.batch_size))

    @property
    def parts(self) -> int:
        """Micro-batches of a step, whose gradients are summed."""
        return 1

    @property
    def chunk_rows(self) -> int | None:
        """Rows of a step that are passed through the encoder at once (GradCache); None: all."""
        return None

    @property
    def distinct_texts(self) -> bool:
        """Whether no text may occur twice in a batch."""
        return False

    @property
    def next_sentences(self) -> bool:
        """Whether a row of the corpus needs the sentence that follows it in its file."""
        return False

    @property
    def scored(self) -> bool:
        """Whether the last column of the corpus is a score."""
        return False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_template(self.template, self.pooling)
        if (len(self.columns) or 1) not in self.readable_columns:
            counts = list(map(str, self.readable_columns))
            allowed = " or ".join(counts) if len(counts) <= 3 else f"{counts[0]} to {counts[-1]}"
            raise ValueError(
                f"columns names {len(self.columns) or 'none'}, but method {self.method!r} reads {allowed}; name as many"
            )
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise ValueError(f"columns names {twice[0]} twice; name each column once")
        if self.weights and len(self.weights) != len(self.corpus):
            raise ValueError(
                f"weights has {len(self.weights)} numbers, but corpus has {len(self.corpus)} files; write one number "
                "for each file"
            )
        patterns = [path for path in self.corpus if has_magic(path) and not Path(path).is_file()]
        if self.weights and patterns:
            raise ValueError(
                f"weights has one number for each file, but corpus has the pattern {patterns[0]}; name each of its "
                "files"
            )
        if self.weights and not sum(self.weights):
            raise ValueError("weights are all 0, so no file is drawn from; write one above 0")
        if self.weights and self.group_by_length:
            raise ValueError("weights and group_by_length order the corpus in two ways; choose one")
        if self.frozen_share < 1 and not self.frozen_layers:
            raise ValueError(
                f"frozen_share is {self.frozen_share:g} and frozen_layers is {self.frozen_layers or 0}, so there is no "
                "layer to thaw; write frozen_layers"
            )
        if self.lora_rank and self.frozen_layers is not None:
            raise ValueError(
                f"lora_rank is {self.lora_rank}, which freezes all layers, but frozen_layers is {self.frozen_layers}; "
                "choose one"
            )
        if "none" in self.report_to and len(self.report_to) > 1:
            raise ValueError(f"report_to is {', '.join(self.report_to)}; write none alone, or remove none")
        if self.max_words is not None and self.max_words < self.min_words:
            raise ValueError(f"max_words is {self.max_words}, but min_words is {self.min_words}; raise max_words")
        return self


def check_template(template: str, pooling: PoolingMode, key: str = "") -> None:
    """Raises ValueError, with a message that begins with `key`, for a template that this pooling cannot use."""
    try:
        Template.parse(template, pooling)
    except TemplateError as error:
        raise ValueError(f"{key}{error}") from error


def shipped_recipes() -> dict[str, str]:
    """Name -> TOML text of the recipes that come with Cloze."""
    folder = files("cloze.training") / "recipes"
    recipes = {
        Path(entry.name).stem: entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return dict(sorted(recipes.items()))


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
        raise RecipeError(f"no recipe {source!r}; give a TOML file, or one of {', '.join(shipped)}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {source}: not TOML: {error}") from error


def choose_preset(keys: Mapping[str, Any], name: str | None, source: str) -> dict[str, Any]:
    """The top keys with those of preset `name` replaced, without the table of presets. Raises RecipeError."""
    presets = keys.get(PRESETS, {})
    if not (isinstance(presets, dict) and all(isinstance(preset, dict) for preset in presets.values())):
        raise RecipeError(f"recipe {source}: presets is not a table of tables; write [presets.NAME] and its keys below")
    if name is not None and name not in presets:
        available = f"its presets are {', '.join(presets)}" if presets else "it has none"
        raise RecipeError(f"recipe {source}: no preset {name!r}; {available}")
    top = {key: value for key, value in keys.items() if key != PRESETS}
    return top | (presets[name] if name else {})


def validate(recipe: type[Recipe], keys: Mapping[str, object], source: str) -> Recipe:
    """Check every key. Raises RecipeError, which names the first wrong key, the value found and what to write."""
    current = {key: value for key, value in keys.items() if key not in RETIRED or value != RETIRED[key]}
    try:
        return recipe.model_validate_json(json.dumps(current, default=str))  # TOML has dates, which no key takes
    except ValidationError as error:
        raise RecipeError(_explain(recipe, keys, source, error.errors()[0])) from error


def _explain(recipe: type[Recipe], keys: Mapping[str, object], source: str, first: ErrorDetails) -> str:
    """The message for one error of validation."""
    key = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"recipe {source}: {_unknown_key(recipe, key)}"
    if first["type"] == "missing":
        return f"recipe {source}: {key} is not set; write {key}: {recipe.model_fields[key].description}"
    problem = _PROBLEMS.get(first["type"], first["msg"].removeprefix("Value error, "))
    if not key:
        return f"recipe {source}: {problem}"
    return f"recipe {source}: {key} is {keys[key]!r}: {problem}; {key} is: {recipe.model_fields[key].description}"


def _unknown_key(recipe: type[Recipe], key: str) -> str:
    """The message for a key that the method does not have."""
    if key in FORMER:
        return f"{key} is now part of {FORMER[key]}; write its values there"
    if key in RETIRED:
        return f"{key} is always {json.dumps(RETIRED[key])} now; leave it out"
    close = difflib.get_close_matches(key, recipe.model_fields, 1)
    hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(recipe.model_fields)}"
    return f"unknown key {key!r}; {hint}"


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML with every key that is set."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    # a JSON string, number, boolean or list of these is a TOML value
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False).translate(DELETE)}\n" for key, value in values.items()
    )


DELETE = {0x7F: "\\u007f"}  # TOML forbids this character in a string, but JSON does not escape it

_PROBLEMS = {
    "bool_type": "write true or false",
    "tuple_type": 'write a list, such as ["one", "two"]',
    "finite_number": "write a finite number",
}
