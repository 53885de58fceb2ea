"""Training: recipe -> corpus -> objective -> Trainer -> run folder, in each process that torchrun started.

`train` does what a command line asks: one run, several seeds, or a dry run of two steps. `resume` continues a run.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from accelerate.utils import broadcast_object_list
from transformers import TrainerState
from transformers.integrations.integration_utils import TensorBoardCallback

from cloze.encoding.bundle import SEARCH_NAMES
from cloze.training.bar import console
from cloze.training.data.corpus import Corpus
from cloze.training.encoder_source import keeps_own_config
from cloze.training.errors import RunError
from cloze.training.evaluation.dev import DevData
from cloze.training.hub.adoption import load_as_served
from cloze.training.inputs import digests_of
from cloze.training.loop.callbacks import Interrupt, Journal, OwnDropout, Patience, Progress, Seldom
from cloze.training.loop.dry_run import dry_run
from cloze.training.loop.prepare import chooser_of, for_this_machine, prepare
from cloze.training.loop.processes import check_shared, keep_memory, processes, restarts_itself
from cloze.training.loop.seeds import SeedRuns, parse_seeds
from cloze.training.loop.trainable import Thaw, first_layers, merge_lora
from cloze.training.loop.trainer import DEV, HELD_OUT, ObjectiveTrainer, training_arguments
from cloze.training.methods.gather import shared
from cloze.training.methods.held_out import HeldOut
from cloze.training.methods.objective import Objective
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.recipes.command import FitOptions, load_recipe
from cloze.training.recipes.recipe import Recipe, to_toml
from cloze.training.run_folder import Run

PARENT: Final = "parent"  # key of the log entry with the dev figures of the encoder as it is served by itself
COSINE_DISTANCE: Final = f"{HELD_OUT}cosine_distance"


def train(recipe: Recipe, options: FitOptions, name: str) -> int:
    """Do what the command line asks with the recipe, called `name`; return the exit code. Raises ClozeError."""
    out, recipe = options.out or Path("runs", name), for_this_machine(recipe)
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
        console.print(f"stopped; continue with: cloze fit --resume {run.path}")
        return 130
    console.print(f"finished: {run.model}{_chosen(run)}; next: {run.export_command}")
    if warning := run.warning():
        console.print(warning)
    return 0


def _chosen(run: Run) -> str:
    """The step whose weights were chosen, the figure that chose them, and its value before training."""
    provenance = run.provenance()
    if provenance["chosen_by"] is None:
        return ""
    score = provenance["held_out_loss"] if provenance["dev_score"] is None else provenance["dev_score"]
    own = provenance.get("parent_score")
    distance = provenance.get("held_out_cosine_distance")
    return (
        f" (step {provenance['best_step']} of {provenance['steps']}, {provenance['chosen_by']} {score:.4g}; "
        f"before training {provenance['before_training']:.4g}"
        + ("" if own is None else f"; the encoder with its own template and pooling {own:.4g}")
        + ("" if distance is None else f"; cosine to the teacher on held-out texts {1 - distance:.4f}")
        + ")"
    )


def _fit_seeds(seeds: SeedRuns) -> int:
    """Train each seed that is not finished, then write and show their scores."""
    seeds.check()
    for seed, run in seeds.runs.items():
        if run.finished:
            console.print(f"{run.path} is finished")
            continue
        console.print(f"{run.path}:")
        if not fit(
            seeds.recipe(seed), run, resume=run.recipe_file.is_file()
        ):  # Ctrl-C, also in the last step of a finished run
            console.print("stopped; continue with the same command")
            return 130
    if processes().is_main_process:
        console.print(seeds.write_summary())
    for run in seeds.runs.values():
        if warning := run.warning():
            console.print(warning)
    console.print(f"finished: {seeds.folder}")
    return 0


def fit(recipe: Recipe, run: Run, resume: bool = False) -> bool:
    """Train by the recipe and write the chosen encoder to the run folder; False if Ctrl-C was pressed.

    A run that is interrupted in its last step is still finished. Every file is read and every key checked before the
    model is loaded. Raises ClozeError.
    """
    keep_memory()
    group, recipe = processes(), for_this_machine(recipe)
    console.quiet |= not processes().is_main_process
    if recipe.workers:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork, and it would warn of that
    corpus, dev, objective = prepare(recipe)
    group.wait_for_everyone()  # until all processes have seen that the folder is free
    with run.space_for(_largest(objective, recipe, len(corpus))):
        return _train(objective, corpus, dev, recipe, run, resume)


def _train(objective: Objective, corpus: Corpus, dev: DevData | None, recipe: Recipe, run: Run, resume: bool) -> bool:
    """Train in the run folder, and write the chosen encoder to it; False if Ctrl-C was pressed."""
    group, inputs = processes(), digests_of(recipe)
    if group.is_main_process:
        run.start(recipe, corpus, inputs)
    check_shared(run.path)
    run.check_inputs(corpus, inputs)
    checkpoint = _checkpoint(run, resume)
    objective.begin(corpus, run.prepared)
    chooser = chooser_of(corpus, dev, recipe)
    arguments = training_arguments(recipe, run.path, chooser, resumed=checkpoint is not None)
    parent = _parent_figures(recipe, dev, run, resumed=checkpoint is not None)
    held_out = HeldOut(corpus.held_out, recipe.seed) if corpus.held_out else None
    evaluation = partial(_figures, dev=dev, parent=parent, held_out=held_out)
    trainer = ObjectiveTrainer(objective, corpus, arguments, evaluation if chooser else None, run.best)
    interrupt = Interrupt()
    _add_callbacks(trainer, recipe, run, interrupt)
    if recipe.frozen_layers and recipe.frozen_share < 1:
        trainer.add_callback(Thaw(first_layers(objective.encoder.backbone, recipe.frozen_layers), recipe.frozen_share))
    began = time.monotonic()
    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if "wandb" in recipe.report_to and group.is_main_process:
        import wandb  # type: ignore[import-not-found]  # installed by the user

        wandb.finish()  # the Trainer leaves its run open, and the next seed would be logged into it
    if interrupt.pressed and trainer.state.global_step < trainer.state.max_steps:
        return False
    trainer.load_best()
    _check_weights(objective)
    if recipe.lora_rank:
        merge_lora(objective.encoder.backbone)
    figures = _chosen_figures(objective, trainer.state, chooser, dev is not None, parent) | {
        "loss": _mean_loss(trainer.state.log_history) or result.training_loss,
        "seconds": round(time.monotonic() - began, 1),
    }
    if group.is_main_process:
        run.finish(objective.save, recipe, corpus, figures)
    group.wait_for_everyone()  # until the run can be read
    return not interrupt.pressed


def _chosen_figures(
    objective: Objective, state: TrainerState, chooser: str | None, has_dev: bool, parent: dict[str, float] | None
) -> dict[str, Any]:
    """What the provenance records about the chosen step and, for comparison, about the parent."""
    best, log, recipe = state.best_metric, state.log_history, objective.recipe
    own = parent.get(chooser.removeprefix(DEV)) if chooser and parent else None
    at_best = (entry for entry in log if entry["step"] == state.best_global_step)
    changes = objective.adds_head or objective.encoder.config.denoising  # then step 0 is not the parent
    untouched = state.best_global_step == 0 and keeps_own_config(recipe.encoder, recipe) and not changes
    return {
        "steps": state.global_step,
        "best_step": state.best_global_step,
        "chosen_by": None if chooser is None else chooser.removeprefix("eval_"),
        "dev_score": best if has_dev else None,
        "held_out_loss": None if has_dev else best,
        "held_out_cosine_distance": next((e[COSINE_DISTANCE] for e in at_best if COSINE_DISTANCE in e), None),
        "before_training": next((entry[chooser] for entry in log if chooser in entry), None),
        "parent_score": own,
        "parent_scores": parent,
        "below_parent": own is not None and best is not None and best < own and not untouched,
    }


def _parent_figures(recipe: Recipe, dev: DevData | None, run: Run, resumed: bool) -> dict[str, float] | None:
    """The dev figures of the encoder as it is served by itself, with its own template and pooling.

    None without dev data, or if the encoder has no embedding configuration. The processes share the work of embedding;
    the first one logs the figures once.
    """
    parent_figures: list[dict[str, float] | None] = [None]
    if dev:
        logged = (entry for entry in run.logged() if PARENT in entry) if resumed else iter(())
        parent_figures = [next(logged, {}).get(PARENT)]
        if parent_figures[0] is None and (encoder := load_as_served(recipe.encoder)) is not None:
            parent_figures = [_dev_figures(dev, encoder)]
            if processes().is_main_process:
                run.log({"step": 0, PARENT: parent_figures[0]})
            figures = ", ".join(f"{name} {value:.4g}" for name, value in (parent_figures[0] or {}).items())
            console.print(f"the encoder with its own template and pooling: {figures}")
    broadcast_object_list(parent_figures)
    return parent_figures[0]


def _mean_loss(log: Sequence[Mapping[str, float]]) -> float | None:
    """Mean of the logged losses, including those before a restart; None if training ended before the first one."""
    losses = [entry["loss"] for entry in log if "loss" in entry]
    return sum(losses) / len(losses) if losses else None


def _largest(objective: Objective, recipe: Recipe, rows: int) -> int:
    """Bytes of the run folder at its largest: checkpoints with AdamW's two moments, the best weights and the model."""
    weights = sum(weight.nbytes for weight in objective.parameters())
    moments = 2 * sum(weight.nbytes for weight in objective.parameters() if weight.requires_grad)
    saved = math.ceil(recipe.steps(rows) / (recipe.save_steps or recipe.eval_steps))
    return min(saved, 3) * (weights + moments) + 2 * weights  # 3: the oldest is deleted when the newest is written


def _checkpoint(run: Run, resume: bool) -> Path | None:
    """The checkpoint from which to continue, as the first process finds it; None to start from the beginning."""
    group = processes()
    checkpoint = [run.rewind(group.num_processes) if resume and group.is_main_process else None]
    broadcast_object_list(checkpoint)
    if checkpoint[0]:
        console.print(f"continuing from {checkpoint[0]}")
    return checkpoint[0]


def _figures(
    objective: Objective,
    start: Mapping[str, float],
    dev: DevData | None,
    parent: Mapping[str, float] | None,
    held_out: HeldOut | None,
) -> dict[str, float]:
    """Figures by their names in the log. Gains are relative to the parent, or else to the scores before the first step.

    The processes share the work of embedding the dev data, and each computes the figures. A process that only waited
    for the first one would be ended by the timeout of its collective, ten minutes with NCCL. The figures of the first
    process count.
    """
    figures: dict[str, float] = {}
    if dev:
        before = parent or {name.removeprefix(DEV): value for name, value in start.items()}
        dev_figures = _dev_figures(dev, objective.encoder, before)
        figures |= {f"{DEV}{name}": value for name, value in dev_figures.items()}
    if held_out:
        figures |= {f"{HELD_OUT}{name}": value for name, value in held_out.figures(objective).items()}
    return figures


def _dev_figures(
    dev: DevData, encoder: SentenceEncoder | GraphEncoder, before: Mapping[str, float] | None = None
) -> dict[str, float]:
    queries, documents = (shared(encoder.named(name).embed) for name in SEARCH_NAMES)
    return dev.score(shared(encoder.embed), queries, documents, before)


def _check_weights(objective: Objective) -> None:
    """Raises RunError if training left weights that are not finite. A logged loss shows this earlier."""
    broken = [name for name, weight in objective.named_parameters() if not weight.isfinite().all()]
    if broken:
        raise RunError(
            f"after training, {len(broken)} weights are not finite, such as {broken[0]}; "
            "lower learning_rate, or use precision = 'fp32'"
        )


def _add_callbacks(trainer: ObjectiveTrainer, recipe: Recipe, run: Run, interrupt: Interrupt) -> None:
    group = processes()
    trainer.add_callback(Progress())
    trainer.add_callback(Journal(run))
    trainer.add_callback(OwnDropout())
    if recipe.save_steps is None:
        trainer.add_callback(Seldom())
    if group.is_main_process and "tensorboard" in recipe.report_to:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and --help does not need it

        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(run.path / "tensorboard"))))
    if recipe.patience is not None:
        trainer.add_callback(Patience(recipe.patience))
    if group.num_processes == 1:  # several would not stop at the same step: with them Ctrl-C stops at once
        trainer.add_callback(interrupt)
