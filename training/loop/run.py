"""Training: recipe -> corpus -> objective -> Trainer -> run folder, in each process that torchrun started.

`train` does what a command line asks: one run, several seeds, or two steps for show. `resume` continues a run.
"""

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Final

import torch
from accelerate.utils import broadcast_object_list
from transformers import set_seed
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.utils.import_utils import is_torch_tf32_available

from encoding.bundle import SEARCH_NAMES
from encoding.errors import TemplateError
from encoding.template import Template
from evaluation.dev import DevData
from training.data.corpus import Corpus, read_corpus
from training.data.sampler import DistinctSampler
from training.errors import CorpusError, RecipeError, RunError
from training.loop.callbacks import Interrupt, Journal, OwnDropout, Patience, Progress
from training.loop.dry_run import dry_run
from training.loop.processes import check_shared, console, keep_memory, processes, restarts_itself
from training.loop.seeds import SeedRuns, parse_seeds
from training.loop.trainable import Thaw, add_lora, first_layers, freeze_embeddings, merge_lora
from training.loop.trainer import DEV, HELD_OUT, ObjectiveTrainer, training_arguments
from training.methods import OBJECTIVES
from training.methods.held_out import HeldOut
from training.methods.objective import Objective
from training.model.encoder import SentenceEncoder
from training.recipes.command import FitOptions, load_recipe
from training.recipes.recipe import Recipe, to_toml
from training.run_folder import Run, model_folder

__all__ = ["fit", "prepare", "resume", "train"]

HELD_OUT_ROWS: Final = 1000  # at most, where a recipe gives no number
HELD_OUT_PART: Final = 20  # one row in 20
FEWEST_HELD_OUT: Final = 32  # a loss of fewer says little: then none are held out, and the last checkpoint is kept


def train(recipe: Recipe, options: FitOptions, name: str) -> int:
    """Do what the command line asks with the recipe, called `name`; return the exit code. Raises ClozeError."""
    out = options.out or Path("runs", name)
    console.quiet = not processes().is_main_process
    if options.dry_run:
        console.print(to_toml(recipe), markup=False)
        corpus, _, objective = prepare(recipe)
        dry_run(recipe, corpus, objective)
        code = 0
    elif options.seeds:
        code = _fit_seeds(SeedRuns(recipe, parse_seeds(options.seeds), out))
    else:
        run = Run.same(out, recipe) if restarts_itself() else Run.fresh(out)
        code = _one_run(recipe, run, resume=run.recipe_file.is_file())
    processes().destroy_process_group()
    return code


def resume(path: Path) -> int:
    """Continue a run; return the exit code. Raises ClozeError."""
    run = Run.open(path)
    console.quiet = not processes().is_main_process
    recipe = load_recipe(str(run.recipe_file))
    code = _one_run(recipe, run, resume=True)
    processes().destroy_process_group()
    return code


def _one_run(recipe: Recipe, run: Run, resume: bool) -> int:
    if run.finished:
        console.print(f"{run.path} is finished; nothing to do")
        return 0
    if not fit(recipe, run, resume) and not run.finished:
        console.print(f"stopped; continue with: python -m training.fit --resume {run.path}")
        return 130
    console.print(f"finished: {run.model}{_chosen(run)}; next: python -m training.export {run.path} models/NAME")
    return 0


def _chosen(run: Run) -> str:
    """Which step's weights were chosen, by which figure, and what that was before training."""
    found = run.provenance()
    if found["chosen_by"] is None:
        return ""
    score = found["held_out_loss"] if found["dev_score"] is None else found["dev_score"]
    return (
        f" (step {found['best_step']} of {found['steps']}, {found['chosen_by']} {score:.4g}; before training "
        f"{found['before_training']:.4g})"
    )


def _fit_seeds(seeds: SeedRuns) -> int:
    """Train each seed that is not finished, then write and show their scores."""
    seeds.check()
    for seed, run in seeds.runs.items():
        if run.finished:
            console.print(f"{run.path} is finished")
            continue
        console.print(f"{run.path}:")
        if not fit(seeds.recipe(seed), run, resume=run.recipe_file.is_file()):  # or asked to, at its last step
            console.print("stopped; continue with the same command")
            return 130
    if processes().is_main_process:
        console.print(seeds.write_summary())
    console.print(f"finished: {seeds.folder}")
    return 0


def fit(recipe: Recipe, run: Run, resume: bool = False) -> bool:
    """Train by the recipe and write the chosen encoder to the run folder; False if Ctrl-C was pressed.

    The run is finished all the same if that was at its last step. Every file is read and every key checked before the
    model is loaded. Raises ClozeError.
    """
    keep_memory()
    group = processes()
    if recipe.workers:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork, and it would warn
    corpus, dev, objective = prepare(recipe)
    group.wait_for_everyone()  # until all have found the folder free
    with run.space_for(_largest(objective, recipe, len(corpus))):
        return _train(objective, corpus, dev, recipe, run, resume)


def _train(objective: Objective, corpus: Corpus, dev: DevData | None, recipe: Recipe, run: Run, resume: bool) -> bool:
    """Train in the run folder, and write the chosen encoder to it; False if Ctrl-C was pressed."""
    group = processes()
    if group.is_main_process:
        run.start(recipe, corpus)
    check_shared(run.path)
    run.check_text(corpus)
    checkpoint = _checkpoint(run, resume)
    objective.begin(chain(corpus.rows, corpus.held_out))
    chooser = _chooser(corpus, dev, recipe)
    arguments = training_arguments(recipe, run.path, chooser, resumed=checkpoint is not None)
    evaluation = partial(_figures, dev=dev, held_out=HeldOut(corpus.held_out, recipe.seed) if corpus.held_out else None)
    trainer = ObjectiveTrainer(objective, corpus, arguments, evaluation if chooser else None, run.best)
    interrupt = Interrupt()
    _add_callbacks(trainer, recipe, run, interrupt)
    if recipe.frozen_layers and recipe.frozen_share < 1:
        trainer.add_callback(Thaw(first_layers(objective.encoder.backbone, recipe.frozen_layers), recipe.frozen_share))
    began = time.monotonic()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if interrupt.asked and trainer.state.global_step < trainer.state.max_steps:
        return False
    trainer.load_best()
    _check_weights(objective)
    if recipe.lora_rank:
        merge_lora(objective.encoder.backbone)
    figures = {
        "steps": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
        "chosen_by": None if chooser is None else chooser.removeprefix("eval_"),
        "dev_score": trainer.state.best_metric if dev else None,
        "held_out_loss": None if dev else trainer.state.best_metric,
        "before_training": next((entry[chooser] for entry in trainer.state.log_history if chooser in entry), None),
        "loss": _mean_loss(trainer.state.log_history),
        "seconds": round(time.monotonic() - began, 1),
    }
    if group.is_main_process:
        run.finish(objective.save, recipe, corpus, figures)
    group.wait_for_everyone()  # until the run can be read
    return not interrupt.asked


def _mean_loss(log: Sequence[Mapping[str, float]]) -> float | None:
    """Of all logged steps, those before a restart included; None if training ended before the first was logged."""
    losses = [entry["loss"] for entry in log if "loss" in entry]
    return sum(losses) / len(losses) if losses else None


def _largest(objective: Objective, recipe: Recipe, rows: int) -> int:
    """Bytes of the run folder at its largest: checkpoints with AdamW's two moments, the best weights and the model."""
    weights = sum(weight.nbytes for weight in objective.parameters())
    moments = 2 * sum(weight.nbytes for weight in objective.parameters() if weight.requires_grad)
    saved = math.ceil(recipe.steps(rows) / (recipe.save_steps or recipe.eval_steps))
    return min(saved, 3) * (weights + moments) + 2 * weights  # 3: the oldest is deleted when the newest is written


def _checkpoint(run: Run, resume: bool) -> Path | None:
    """Where to continue, as the first process finds it; None to begin."""
    group = processes()
    found = [run.rewind(group.num_processes) if resume and group.is_main_process else None]
    broadcast_object_list(found)
    if found[0]:
        console.print(f"continuing from {found[0]}")
    return found[0]


def prepare(recipe: Recipe) -> tuple[Corpus, DevData | None, Objective]:
    """Read the corpus and the dev data, then build the objective; its new weights depend on the seed."""
    method = OBJECTIVES[recipe.method]
    _check_devices(recipe)
    for name in recipe.report_to:
        if name != "none" and find_spec(name) is None:
            package = "'cloze[report]'" if name == "tensorboard" else name
            raise RecipeError(f"report_to has {name}, which is not installed: pip install {package}")
    if (len(recipe.columns) or 1) not in method.columns:
        counts = list(map(str, method.columns))
        allowed = " or ".join(counts) if len(counts) <= 3 else f"{counts[0]} to {counts[-1]}"
        raise RecipeError(f"columns names {len(recipe.columns) or 'none'}; method {recipe.method!r} reads {allowed}")
    dev = DevData.load(recipe.dev) if recipe.dev else None
    corpus = read_corpus(
        recipe.corpus,
        recipe.columns,
        recipe.min_words,
        recipe.max_words,
        recipe.sentences,
        recipe.seed,
        recipe.next_sentences,
        recipe.scored,
    )
    if len(corpus) < recipe.batch_size:
        raise CorpusError(f"{corpus}: fewer than one batch of {recipe.batch_size}; add text or lower batch_size")
    _hold_out(corpus, recipe)
    _check_weighted_files(corpus, recipe)
    if getattr(recipe, "no_duplicates", False):
        DistinctSampler(corpus.rows, recipe.batch_size, recipe.seed)  # raises CorpusError if it has no batch
    if recipe.patience is not None and _chooser(corpus, dev, recipe) is None:
        raise RecipeError(
            f"patience is {recipe.patience} and counts evaluations, of which there are none; write dev or held_out, or "
            "remove patience"
        )
    console.print(f"corpus: {corpus}")
    set_seed(recipe.seed)
    encoder = SentenceEncoder.load(
        model_folder(recipe.encoder),
        template=recipe.template,
        pooling=recipe.pooling,
        final_period=recipe.final_period,
        denoising=False,  # whatever the parent served; a method that serves it sets it
    )
    _keep_fitting_templates(encoder)
    objective = method(encoder, recipe)
    if recipe.compile:
        objective.encoder.backbone.compile(dynamic=True)  # in place: the names of the weights do not change
    if recipe.lora_rank:
        add_lora(objective.encoder.backbone, recipe.lora_rank, recipe.lora_alpha)
    if recipe.frozen_layers is not None:
        freeze_embeddings(objective.encoder.backbone)
        first_layers(objective.encoder.backbone, recipe.frozen_layers).requires_grad_(recipe.frozen_share < 1)
    return corpus, dev, objective


def _keep_fitting_templates(encoder: SentenceEncoder) -> None:
    """Leave out the parent's named templates that have no [MASK], or have one, where this pooling needs the other."""
    kept = {}
    for name, template in encoder.config.templates.items():
        try:
            Template.parse(template, encoder.config.pooling)
        except TemplateError as error:
            console.print(f"the parent's template {name!r} is left out: {error}")
        else:
            kept[name] = template
    encoder.reconfigure(encoder.config.model_copy(update={"templates": kept}))


def _hold_out(corpus: Corpus, recipe: Recipe) -> None:
    """Take the rows that are not trained on out of the corpus. Raises RecipeError."""
    most = len(corpus) - recipe.batch_size
    count = recipe.held_out
    if count is None:
        count = 0 if recipe.dev else min(HELD_OUT_ROWS, len(corpus) // HELD_OUT_PART, most)
        count = count if count >= FEWEST_HELD_OUT else 0
        count -= count % recipe.batch_size if count > recipe.batch_size else 0  # whole batches are scored
    elif count > most:
        raise RecipeError(
            f"held_out is {count:,} and the corpus has {len(corpus):,} rows, of which a batch of {recipe.batch_size:,} "
            f"has to stay; write {max(0, most):,} at most"
        )
    least = 2 * processes().num_processes
    if 0 < count < least:
        raise RecipeError(f"held_out is {count} and a loss needs {least} rows or more; raise it, or write 0")
    corpus.hold_out(count, recipe.seed)


def _check_weighted_files(corpus: Corpus, recipe: Recipe) -> None:
    """Raises CorpusError if a file that has a weight has no rows."""
    left = set(corpus.files().tolist()) if recipe.weights else set()
    for number, weight in enumerate(recipe.weights):
        if weight and number not in left:
            raise CorpusError(
                f"{recipe.corpus[number]} has the weight {weight:g} and no sentence left to train on ({corpus}); write "
                "0, or check sentences, min_words, max_words"
            )


def _chooser(corpus: Corpus, dev: DevData | None, recipe: Recipe) -> str | None:
    """The figure of the log that chooses a checkpoint; None if the last one is kept."""
    if dev:
        return DEV + dev.chooser(recipe.dev_choice)
    return f"{HELD_OUT}loss" if corpus.held_out else None


def _figures(
    objective: Objective, start: Mapping[str, float], dev: DevData | None, held_out: HeldOut | None
) -> dict[str, float]:
    """Figures by their names in the log, given those before the first step.

    The first process scores the dev data; the loss needs all processes.
    """
    figures: dict[str, float] = {}
    if dev and processes().is_main_process:
        encoder = objective.encoder
        queries, documents = (encoder.named(name).embed for name in SEARCH_NAMES)
        before = {name.removeprefix(DEV): value for name, value in start.items()}
        found = dev.score(encoder.embed, queries, documents, before)
        figures |= {f"{DEV}{name}": value for name, value in found.items()}
    if held_out:
        figures |= {f"{HELD_OUT}{name}": value for name, value in held_out.figures(objective).items()}
    return figures


def _check_devices(recipe: Recipe) -> None:
    count, devices = processes().num_processes, torch.cuda.device_count()
    if count == 1 and devices > 1:
        raise RecipeError(
            f"{devices} GPUs are visible and would be joined by DataParallel, which computes a loss per GPU; "
            f"use all: torchrun --nproc_per_node {devices} -m training.fit ..., or make one visible: "
            "CUDA_VISIBLE_DEVICES=0"
        )
    parts = getattr(recipe, "accumulation_steps", 1)
    if recipe.batch_size % (count * parts):
        raise RecipeError(
            f"batch_size is {recipe.batch_size} and is split among {count} processes"
            f"{f', in {parts} parts each' if parts > 1 else ''}; write a multiple of {count * parts}"
        )
    if count > 1 and recipe.frozen_layers and recipe.frozen_share < 1:
        raise RecipeError(
            f"frozen_share is {recipe.frozen_share:g}, and {count} processes cannot thaw layers; write 1, or use one"
        )
    if recipe.precision == "tf32" and not is_torch_tf32_available():
        raise RecipeError("precision is 'tf32', which needs an NVIDIA GPU of compute capability 8; write fp32 or bf16")
    if recipe.compile and not torch.cuda.is_available() and shutil.which("c++") is None:
        raise RecipeError("compile is true, and on a CPU that needs a C++ compiler; install g++, or write false")
    if recipe.precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise RecipeError("precision is 'bf16' and this GPU has none; write precision = 'fp32'")


def _check_weights(objective: Objective) -> None:
    """Raises RunError for a model that training broke, which a logged loss shows earlier."""
    broken = [name for name, weight in objective.named_parameters() if not weight.isfinite().all()]
    if broken:
        raise RunError(
            f"after training {len(broken)} weights are not finite, {broken[0]} among them; "
            "lower learning_rate, or use precision = 'fp32'"
        )


def _add_callbacks(trainer: ObjectiveTrainer, recipe: Recipe, run: Run, interrupt: Interrupt) -> None:
    group = processes()
    trainer.add_callback(Progress())
    trainer.add_callback(Journal(run))
    trainer.add_callback(OwnDropout())
    if group.is_main_process and "tensorboard" in recipe.report_to:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and --help does not need it

        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(run.path / "tensorboard"))))
    if recipe.patience is not None:
        trainer.add_callback(Patience(recipe.patience))
    if group.num_processes == 1:  # several would not stop at the same step: there Ctrl-C stops at once
        trainer.add_callback(interrupt)
