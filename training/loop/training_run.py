"""One training run: recipe -> corpus -> objective -> Trainer -> run folder, in each process that torchrun started."""

import os
import shutil
import time
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from transformers import set_seed
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.utils.import_utils import is_torch_tf32_available

from training.data.corpus import Corpus, read_corpus
from training.data.dev_data import DevData
from training.errors import CorpusError, RecipeError, RunError
from training.loop.allocator import keep_memory
from training.loop.arguments import training_arguments
from training.loop.callbacks import Interrupt, Journal, OwnDropout, Patience, Progress
from training.loop.processes import check_shared, console, processes
from training.loop.run_folder import Run
from training.loop.trainer import ObjectiveTrainer
from training.methods.objective import Objective
from training.model.encoder import SentenceEncoder
from training.recipes.keys import Recipe

__all__ = ["fit", "prepare"]


def fit(method: type[Objective], recipe: Recipe, run: Run, resume: bool = False) -> bool:
    """Train by the recipe and write the chosen encoder to the run folder; False if Ctrl-C stopped it.

    Every file is read and every key checked before the model is loaded. Raises ClozeError.
    """
    keep_memory()
    group = processes()
    if recipe.workers:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork, and it would warn
    corpus, dev, objective = prepare(method, recipe)
    group.wait_for_everyone()  # until all have found the folder free
    if group.is_main_process:
        run.start(recipe, corpus)
    check_shared(run.path)
    run.check_text(corpus)
    checkpoint = _checkpoint(run, resume)
    chooser, score = (dev.chooser, dev.score) if dev else (None, None)
    arguments = training_arguments(recipe, run.path, chooser, resumed=checkpoint is not None)
    trainer = ObjectiveTrainer(objective, corpus, arguments, score, run.best)
    interrupt = Interrupt()
    _add_callbacks(trainer, recipe, run, interrupt)
    began = time.monotonic()
    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if interrupt.asked and trainer.state.global_step < trainer.state.max_steps:
        return False
    trainer.load_best()
    _check_weights(objective)
    figures = {
        "steps": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
        "dev_score": trainer.state.best_metric,
        "loss": result.training_loss,
        "seconds": round(time.monotonic() - began, 1),
    }
    if group.is_main_process:
        run.finish(objective.save, recipe, corpus, figures)
    return True


def _checkpoint(run: Run, resume: bool) -> Path | None:
    """Where to continue, as the first process finds it; None to begin."""
    group = processes()
    found = [run.rewind(group.num_processes) if resume and group.is_main_process else None]
    broadcast_object_list(found)
    if found[0]:
        console.print(f"continuing from {found[0]}")
    return found[0]


def prepare(method: type[Objective], recipe: Recipe) -> tuple[Corpus, DevData | None, Objective]:
    """Read the corpus and the dev data, then build the objective; its new weights depend on the seed."""
    _check_devices(recipe)
    if (len(recipe.columns) or 1) not in method.columns:
        allowed = " or ".join(map(str, method.columns))
        raise RecipeError(f"columns names {len(recipe.columns) or 'none'}; method {recipe.method!r} reads {allowed}")
    dev = DevData.load(recipe)
    corpus = read_corpus(
        recipe.corpus,
        recipe.columns,
        recipe.min_words,
        recipe.max_words,
        recipe.sentences,
        recipe.seed,
        recipe.next_sentences,
    )
    if len(corpus) < recipe.batch_size:
        raise CorpusError(f"{corpus}: fewer than one batch of {recipe.batch_size}; add text or lower batch_size")
    console.print(f"corpus: {corpus}")
    set_seed(recipe.seed)
    encoder = SentenceEncoder.load(
        recipe.encoder,
        template=recipe.template,
        pooling=recipe.pooling,
        final_period=recipe.final_period,
        denoising=False,  # whatever the parent served; a method that serves it sets it
    )
    if recipe.compile:
        encoder.backbone.compile(dynamic=True)  # in place: the names of the weights do not change
    return corpus, dev, method(encoder, recipe)


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
    if group.is_main_process:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and --help does not need it

        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(run.path / "tensorboard"))))
    if recipe.patience is not None:
        trainer.add_callback(Patience(recipe.patience))
    if group.num_processes == 1:  # several would not stop at the same step: there Ctrl-C stops at once
        trainer.add_callback(interrupt)
