"""One training run: recipe -> corpus -> objective -> Trainer -> run folder; in each process that torchrun started."""

import os
import shutil
import time

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import set_seed
from transformers.integrations import TensorBoardCallback
from transformers.utils import is_torch_tf32_available

from training.corpus import Corpus, read_corpus
from training.dev import DevData
from training.encoder import SentenceEncoder
from training.errors import CorpusError, RecipeError, RunError
from training.memory import keep_memory
from training.objective import Objective
from training.objectives import OBJECTIVES
from training.recipe import Recipe
from training.run import Run
from training.trainer import Interrupt, Journal, ObjectiveTrainer, OwnDropout, Patience, training_arguments

__all__ = ["console", "fit", "prepare", "processes"]

console = Console(stderr=True, soft_wrap=True, highlight=False)


def processes() -> PartialState:
    """This process among those that torchrun started; the first call joins them. Without torchrun, one alone."""
    return PartialState(cpu=not torch.cuda.is_available())


def fit(recipe: Recipe, run: Run, resume: bool = False) -> bool:
    """Train as the recipe says and leave the chosen encoder in the run folder; False where Ctrl-C stopped it.

    Every file is read and every key checked before the model is loaded. Raises ClozeError.
    """
    keep_memory()
    group = processes()
    if recipe.workers:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not outlive a fork; the tokenizer would say so
    corpus, dev, objective = prepare(recipe)
    group.wait_for_everyone()  # until all have found the folder free
    with group.main_process_first():
        run.start(recipe, corpus)
        checkpoint = run.rewind(group.num_processes) if resume else None
    arguments = training_arguments(recipe, run, dev and dev.chooser, resumed=checkpoint is not None)
    trainer = ObjectiveTrainer(objective, dev, run.best, args=arguments, train_dataset=corpus)
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
        run.finish(objective, recipe, corpus, figures)
    return True


def prepare(recipe: Recipe) -> tuple[Corpus, DevData | None, Objective]:
    """Read the corpus and the dev data, then build the objective with seeded fresh weights."""
    _check_devices(recipe)
    kind = OBJECTIVES[recipe.method]
    if (len(recipe.columns) or 1) not in kind.columns:
        allowed = " or ".join(map(str, kind.columns))
        raise RecipeError(f"columns names {len(recipe.columns) or 'none'}; method {recipe.method!r} reads {allowed}")
    dev = DevData.load(recipe)
    corpus = read_corpus(
        recipe.corpus, recipe.columns, recipe.min_words, recipe.max_words, recipe.sentences, recipe.seed
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
        denoising=False,  # whatever the parent served; a method that serves it says so
    )
    if recipe.compile:
        encoder.backbone.compile(dynamic=True)  # in place: the names of the weights stay
    return corpus, dev, kind(encoder, recipe)


def _check_devices(recipe: Recipe) -> None:
    count, devices = processes().num_processes, torch.cuda.device_count()
    if count == 1 and devices > 1:
        raise RecipeError(
            f"{devices} GPUs are visible and would be joined by DataParallel, which takes each one's negatives alone; "
            f"use all: torchrun --nproc_per_node {devices} -m training.fit ..., or make one visible: "
            "CUDA_VISIBLE_DEVICES=0"
        )
    if recipe.batch_size % count:
        raise RecipeError(f"batch_size is {recipe.batch_size} and is split among {count} processes; write a multiple")
    if recipe.precision == "tf32" and not is_torch_tf32_available():
        raise RecipeError("precision is 'tf32', which needs an NVIDIA GPU of compute capability 8; write fp32 or bf16")
    if recipe.compile and not torch.cuda.is_available() and shutil.which("c++") is None:
        raise RecipeError("compile is true, and on a CPU that needs a C++ compiler; install g++, or write false")
    if recipe.precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise RecipeError("precision is 'bf16' and this GPU has none; write precision = 'fp32'")


def _check_weights(objective: Objective) -> None:
    """Raises RunError for a model that training broke; where the loss is logged it is found earlier."""
    broken = [name for name, weight in objective.named_parameters() if not weight.isfinite().all()]
    if broken:
        raise RunError(
            f"after training {len(broken)} weights are no finite numbers, {broken[0]} among them; "
            "lower learning_rate, or use precision = 'fp32'"
        )


def _add_callbacks(trainer: ObjectiveTrainer, recipe: Recipe, run: Run, interrupt: Interrupt) -> None:
    group = processes()
    trainer.add_callback(Journal(run))
    trainer.add_callback(OwnDropout())
    if group.is_main_process:
        from torch.utils.tensorboard import SummaryWriter

        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(run.path / "tensorboard"))))
    if recipe.patience is not None:
        trainer.add_callback(Patience(recipe.patience))
    if group.num_processes == 1:  # several would not stop at the same step: there Ctrl-C stops at once
        trainer.add_callback(interrupt)
