"""python -m training.fit RECIPE [--key value ...]: recipe -> corpus -> objective -> Trainer -> run folder.

Without arguments: the recipes and an example.
"""

import argparse
import math
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers import TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback

from training.cli import run as run_command
from training.corpus import Corpus, read_corpus
from training.encoder import SentenceEncoder
from training.errors import CorpusError, RecipeError
from training.objective import Objective
from training.objectives import OBJECTIVES
from training.recipe import (
    PRESETS,
    Recipe,
    choose_preset,
    parse_value,
    read_toml,
    shipped_recipes,
    to_toml,
    unknown_key,
    validate,
)
from training.run import Run
from training.sts import Pairs, load_pairs
from training.trainer import Interrupt, Journal, ObjectiveTrainer, training_arguments

__all__ = ["fit", "load_recipe", "main"]

console = Console(stderr=True, soft_wrap=True, highlight=False)


def load_recipe(source: str, overrides: dict[str, list[str]] | None = None, preset: str | None = None) -> Recipe:
    """A shipped recipe or a TOML file, a preset over its keys and command-line words over both. Raises RecipeError."""
    keys = choose_preset(read_toml(source), preset, source)
    model = _method(keys, source).Recipe
    for key, words in (overrides or {}).items():
        if key not in model.model_fields:
            raise RecipeError(f"recipe {source}: {unknown_key(model, key)}")
        keys[key] = parse_value(model, key, words)
    return validate(model, keys, source)


def _method(keys: Mapping[str, object], source: str) -> type[Objective]:
    method = keys.get("method")
    if not isinstance(method, str) or method not in OBJECTIVES:
        raise RecipeError(f"recipe {source}: method is {method!r}; write one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[method]


def fit(recipe: Recipe, run: Run, resume: bool = False) -> bool:
    """Train as the recipe says and leave the chosen encoder in the run folder; False where Ctrl-C stopped it.

    Every file is read and every key checked before the model is loaded. Raises ClozeError.
    """
    corpus, pairs, objective = prepare(recipe)
    run.start(recipe, corpus)
    checkpoint = run.rewind() if resume else None
    interrupt = Interrupt()
    trainer = _trainer(objective, corpus, pairs, training_arguments(recipe, run, dev=pairs is not None))
    trainer.add_callback(Journal(run))
    trainer.add_callback(_tensorboard(run))
    trainer.add_callback(interrupt)
    began = time.monotonic()
    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if interrupt.asked and trainer.state.global_step < trainer.state.max_steps:
        return False
    figures = {
        "steps": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
        "dev_spearman": trainer.state.best_metric,
        "loss": result.training_loss,
        "seconds": round(time.monotonic() - began, 1),
    }
    run.finish(objective, recipe, corpus, figures)
    return True


def _check_precision(recipe: Recipe) -> None:
    if recipe.precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise RecipeError("precision is 'bf16' and this GPU has none; write precision = 'fp32'")


def prepare(recipe: Recipe) -> tuple[Corpus, Pairs | None, Objective]:
    """Read the corpus and the dev pairs, then build the objective with seeded fresh weights."""
    _refuse_many_devices()
    _check_precision(recipe)
    kind = OBJECTIVES[recipe.method]
    if (len(recipe.columns) or 1) not in kind.columns:
        allowed = " or ".join(map(str, kind.columns))
        raise RecipeError(f"method {recipe.method!r} reads {allowed} columns, columns names {len(recipe.columns)}")
    pairs = load_pairs(Path(recipe.dev)) if recipe.dev else None
    corpus = read_corpus(
        recipe.corpus, recipe.columns, recipe.min_words, recipe.max_words, recipe.sentences, recipe.seed
    )
    if len(corpus) < recipe.batch_size:
        raise CorpusError(f"{corpus}: fewer than one batch of {recipe.batch_size}; add text or lower batch_size")
    console.print(f"corpus: {corpus}")
    set_seed(recipe.seed)
    encoder = SentenceEncoder.load(
        recipe.encoder, template=recipe.template, read_out=recipe.read_out, final_period=recipe.final_period
    )
    return corpus, pairs, kind(encoder, recipe)


def dry_run(recipe: Recipe, steps: int = 2) -> None:
    """Print the recipe, one decoded example a view, the loss of two steps, memory and speed; keep nothing."""
    console.print(to_toml(recipe), markup=False)
    corpus, _, objective = prepare(recipe)
    for name, view in objective.views(corpus.rows[: recipe.batch_size]).items():
        length = int(view["attention_mask"][0].sum())
        text = objective.encoder.tokenizer.decode(view["input_ids"][0, :length])
        console.print(f"view {name}: {tuple(view['input_ids'].shape)} tokens, such as: {text}", markup=False)
    with tempfile.TemporaryDirectory() as folder:
        short = recipe.model_copy(update={"max_steps": steps, "log_steps": 1, "eval_steps": steps + 1})
        trainer = _trainer(objective, corpus, None, training_arguments(short, Run(Path(folder)), dev=False))
        began = time.monotonic()
        trainer.train()
        seconds = (time.monotonic() - began) / steps
    total = recipe.max_steps or math.ceil(recipe.epochs * (len(corpus) // recipe.batch_size))
    console.print(f"memory: {_peak_memory():.2f} GB")
    console.print(
        f"speed: {recipe.batch_size / seconds:.0f} sentences a second; "
        f"{total} steps would take {total * seconds / 60:.0f} minutes"
    )


def _trainer(
    objective: Objective, corpus: Corpus, pairs: Pairs | None, arguments: TrainingArguments
) -> ObjectiveTrainer:
    return ObjectiveTrainer(objective, pairs, args=arguments, train_dataset=corpus)


def _tensorboard(run: Run) -> TensorBoardCallback:
    from torch.utils.tensorboard import SummaryWriter

    return TensorBoardCallback(SummaryWriter(str(run.path / "tensorboard")))


def _peak_memory() -> float:
    """Gigabytes: of the accelerator where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _refuse_many_devices() -> None:
    if torch.cuda.device_count() > 1:
        raise RecipeError(
            f"{torch.cuda.device_count()} GPUs are visible and would be joined by DataParallel, which takes each one's "
            "negatives alone; make one visible: CUDA_VISIBLE_DEVICES=0"
        )


def _overview() -> str:
    lines = ["The recipes that come with Cloze (a path to a TOML file works as well):", ""]
    for name, text in shipped_recipes().items():
        lines.append(f"  {name:24} {text.splitlines()[0].lstrip('# ')}")
    lines += ["", "Example:", "", "  python -m training.fit promptbert --corpus my-sentences.txt --out runs/mine"]
    lines += ["", "Keys of a recipe:  python -m training.fit promptbert --help"]
    return "\n".join(lines)


def _key_help(source: str, preset: str | None) -> str:
    """The presets, then a line a key: its value in this recipe and what it means."""
    whole = read_toml(source)
    keys = choose_preset(whole, preset, source)
    model = _method(keys, source).Recipe
    lines = [
        f"  --preset {name:20} {', '.join(f'{key} {value}' for key, value in own.items())}"
        for name, own in whole.get(PRESETS, {}).items()
    ]
    lines = [f"Presets of the recipe {source}:", *lines, ""] if lines else []
    lines += [f"Keys of the recipe {source}, each a --key of the command line too:"]
    for name, field in model.model_fields.items():
        default = keys.get(name, None if field.is_required() else field.default)
        lines.append(f"  --{name} {'' if default in (None, ()) else default}\n        {field.description}")
    return "\n".join(lines)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    parser = argparse.ArgumentParser(
        prog="python -m training.fit",
        description="Train a sentence encoder by a recipe.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("recipe", nargs="?", help="a shipped recipe's name or a TOML file")
    parser.add_argument(
        "--preset", metavar="NAME", help="lay a preset of the recipe, such as a backbone's, over its keys"
    )
    parser.add_argument("--out", type=Path, help="the run folder to make (default: runs/RECIPE)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue a run that was stopped")
    parser.add_argument("--dry-run", action="store_true", help="two steps, an example a view, memory and speed")
    parser.add_argument("-h", "--help", action="store_true", help="this help; with RECIPE: its keys")
    known, rest = parser.parse_known_args(arguments)
    if known.help:
        print(parser.format_help() + "\n" + (_key_help(known.recipe, known.preset) if known.recipe else _overview()))
        sys.exit(0)
    overrides: dict[str, list[str]] = {}
    key = None
    for word in rest:
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            key = key.replace("-", "_")
            overrides[key] = [value] if value else []
        elif key is None:
            raise RecipeError(f"unexpected {word!r}; write --key value")
        else:
            overrides[key].append(word)
    return known, overrides


def main(arguments: Sequence[str] | None = None) -> int:
    options, overrides = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.resume:
        if options.recipe or options.preset or overrides:
            raise RecipeError("--resume continues with the run's own recipe; leave RECIPE and keys away")
        run = Run.open(options.resume)
        recipe = load_recipe(str(run.recipe_file))
        if run.finished:
            console.print(f"{run.path} is finished; nothing to do")
            return 0
    elif not options.recipe:
        print(_overview())
        return 0
    else:
        recipe = load_recipe(options.recipe, overrides, options.preset)
        if options.dry_run:
            dry_run(recipe)
            return 0
        run = Run.fresh(options.out or Path("runs", Path(options.recipe).stem))
    if not fit(recipe, run, resume=bool(options.resume)):
        console.print(f"stopped; continue with: python -m training.fit --resume {run.path}")
        return 130
    console.print(f"finished: {run.model}; next: python -m training.export {run.path} models/NAME")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
