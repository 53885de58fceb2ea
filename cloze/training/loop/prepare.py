"""Prepare a run: check the recipe, read the text and build the objective, before anything is written."""

import math
import shutil
from importlib.util import find_spec
from typing import Final

import torch
from transformers import set_seed
from transformers.utils.import_utils import is_torch_tf32_available

from cloze.encoding.errors import TemplateError
from cloze.encoding.template import Template
from cloze.training.bar import console
from cloze.training.data.corpus import Corpus, read_corpus
from cloze.training.data.sampler import DistinctSampler
from cloze.training.encoder_source import (
    keeps_own_config,
    kind_of,
    layers_behind,
    learnt_sentences,
    of_library,
    own_config,
)
from cloze.training.errors import CorpusError, RecipeError
from cloze.training.evaluation.dev import DevData
from cloze.training.loop.processes import processes
from cloze.training.loop.trainable import add_lora, first_layers, freeze_embeddings
from cloze.training.loop.trainer import DEV, HELD_OUT
from cloze.training.methods import objective_of
from cloze.training.methods.objective import Objective
from cloze.training.methods.ranking import read_documents
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.pretrained import has_bf16
from cloze.training.recipes.methods import RankingRecipe, ScoredRecipe
from cloze.training.recipes.recipe import Recipe

GPU_WORKERS: Final = 2  # processes that tokenise: a GPU would wait for this one
FEWEST_STEPS: Final = 50  # with fewer, training changes little
SMALLEST_BATCH: Final = 8  # the smallest that is proposed: a smaller batch has too few negatives
HELD_OUT_ROWS: Final = 1000  # at most, unless the recipe gives a number
HELD_OUT_PART: Final = 20  # one row in 20
FEWEST_HELD_OUT: Final = 32  # a loss over fewer says little: then no row is held out, and the last checkpoint is kept


def prepare(recipe: Recipe) -> tuple[Corpus, DevData | None, Objective]:
    """Read the corpus and the dev data, then build the objective; its new weights depend on the seed.

    Every key is checked and every file read before the model is loaded. Raises ClozeError.
    """
    _check_devices(recipe)
    _check_trackers(recipe)
    dev = DevData.load(recipe.dev) if recipe.dev else None
    corpus = _read(recipe)
    if isinstance(recipe, RankingRecipe) and recipe.documents:
        read_documents(recipe)
    if recipe.patience is not None and chooser_of(corpus, dev, recipe) is None:
        raise RecipeError(
            f"patience is {recipe.patience}, but it counts evaluations, and there are none without dev or held_out; "
            "write one of these, or remove patience"
        )
    console.print(f"corpus: {corpus}")
    console.print(f"template and pooling: {recipe.template!r}, {recipe.pooling}", highlight=False)
    if recipe.precision == "bf16" and not torch.cuda.is_available() and not has_bf16():
        console.print(
            "warning: precision is bf16, which this CPU emulates: a step takes many times as long as in fp32; give "
            "--precision fp32"
        )
    if warning := _too_few_steps(recipe, len(corpus)):
        console.print(warning)
    if note := _little_to_gain(recipe):
        console.print(note)
    return corpus, dev, _build(recipe)


def for_this_machine(recipe: Recipe) -> Recipe:
    """The recipe with the precision and the workers that suit this machine, unless it names them.

    Both change the results, so a resumed run keeps them.
    """
    gpu, settings = torch.cuda.is_available(), dict[str, object]()
    if recipe.precision == "auto":
        settings["precision"] = "bf16" if gpu and has_bf16() else "fp32"
    if recipe.workers is None:
        settings["workers"] = GPU_WORKERS if gpu else 0
    return recipe.model_copy(update=settings)


def _too_few_steps(recipe: Recipe, rows: int) -> str | None:
    """A warning that says how to get more steps from the text; None if there are enough."""
    steps = recipe.steps(rows)
    if recipe.max_steps or steps >= FEWEST_STEPS:
        return None
    sizes = (2**power for power in range(SMALLEST_BATCH.bit_length() - 1, recipe.batch_size.bit_length()))
    enough = [size for size in sizes if recipe.model_copy(update={"batch_size": size}).steps(rows) >= FEWEST_STEPS]
    size = max(enough, default=SMALLEST_BATCH)
    epochs = recipe.epochs * max(1, math.ceil(FEWEST_STEPS / max(1, rows // size * recipe.epochs)))
    advice = [f"--batch-size {size}"] if size < recipe.batch_size else []
    advice += [f"--epochs {epochs:g}"] if epochs > recipe.epochs else []
    return (
        f"warning: {rows:,} rows in batches of {recipe.batch_size:,} are only {steps} steps of training; give "
        f"{' and '.join(advice)} for {FEWEST_STEPS} or more, or more text"
    )


def _little_to_gain(recipe: Recipe) -> str | None:
    """A note if a method without labels is to train an encoder that was already trained for sentences; else None."""
    alone = objective_of(recipe.method).contrastive and len(recipe.columns) < 2
    if not alone or own_config(recipe.encoder) is None or not learnt_sentences(recipe.encoder):
        return None
    return (
        f"note: {recipe.encoder} was trained for sentences, and {recipe.method} on text alone seldom makes such an "
        "encoder better; cloze adapt learns from your documents and queries, and says whether it helps"
    )


def chooser_of(corpus: Corpus, dev: DevData | None, recipe: Recipe) -> str | None:
    """The figure of the log that chooses a checkpoint; None if the last one is kept."""
    if dev:
        return DEV + dev.chooser(recipe.dev_choice)
    return f"{HELD_OUT}loss" if corpus.held_out else None


def check_ranking_devices() -> None:
    """Raises RecipeError if there are several processes or devices: the method `ranking`, as in adapt, needs one."""
    count, devices = processes().num_processes, torch.cuda.device_count()
    if max(count, devices) > 1:
        raise RecipeError(
            "the method ranking, which adapt uses too, needs all documents of a batch in one process and on one "
            f"device, but there are {count} processes and {devices} devices; start it without torchrun, and with one "
            "GPU: CUDA_VISIBLE_DEVICES=0"
        )


def _check_devices(recipe: Recipe) -> None:
    count, devices = processes().num_processes, torch.cuda.device_count()
    if isinstance(recipe, RankingRecipe):
        check_ranking_devices()
    if count == 1 and devices > 1:
        raise RecipeError(
            f"{devices} GPUs are visible and would be joined by DataParallel, which computes a loss per GPU; "
            f"use all: torchrun --nproc_per_node {devices} -m cloze.training.fit ..., or make one visible: "
            "CUDA_VISIBLE_DEVICES=0"
        )
    parts = recipe.parts
    if recipe.batch_size % (count * parts):
        raise RecipeError(
            f"batch_size is {recipe.batch_size}, but it is split among {count} processes"
            f"{f', in {parts} parts each' if parts > 1 else ''}; write a multiple of {count * parts}"
        )
    if count > 1 and recipe.frozen_layers and recipe.frozen_share < 1:
        raise RecipeError(
            f"frozen_share is {recipe.frozen_share:g}, but {count} processes cannot thaw layers; write 1, or use one "
            "process"
        )
    if recipe.precision == "tf32" and not is_torch_tf32_available():
        raise RecipeError("precision is 'tf32', which needs an NVIDIA GPU of compute capability 8; write fp32 or bf16")
    if recipe.compile and not torch.cuda.is_available() and shutil.which("c++") is None:
        raise RecipeError("compile is true, which needs a C++ compiler on a CPU; install g++, or write false")
    if recipe.precision == "bf16" and torch.cuda.is_available() and not has_bf16():
        raise RecipeError("precision is 'bf16', which this GPU does not support; write precision = 'fp32'")


def _check_trackers(recipe: Recipe) -> None:
    """Raises RecipeError for a tracker that is not installed."""
    for name in recipe.report_to:
        if name != "none" and find_spec(name) is None:
            package = "'.[report]' in a clone of Cloze" if name == "tensorboard" else name
            raise RecipeError(f"report_to has {name}, which is not installed: pip install {package}")


def _read(recipe: Recipe) -> Corpus:
    """The corpus without the rows that are held out. Raises CorpusError, RecipeError."""
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
    if isinstance(recipe, ScoredRecipe) and len({row[-1] for row in corpus.rows}) == 1:
        raise CorpusError(
            f"{', '.join(recipe.corpus)}: every row has the score {corpus.rows[0][-1]}, so there is nothing to rank; "
            "give rows with several scores"
        )
    if len(corpus) < recipe.batch_size:
        raise CorpusError(f"{corpus}: fewer than one batch of {recipe.batch_size}; add text or lower batch_size")
    corpus = _hold_out(corpus, recipe)
    _check_weighted_files(corpus, recipe)
    if recipe.distinct_texts:
        DistinctSampler(corpus.rows, recipe.batch_size, recipe.seed)  # raises CorpusError if it has no batch
    return corpus


def _hold_out(corpus: Corpus, recipe: Recipe) -> Corpus:
    """The corpus without the rows that are held out and without the rows that repeat them.

    Raises CorpusError, RecipeError.
    """
    limit = len(corpus) - recipe.batch_size
    minimum = 2 * processes().num_processes
    count = recipe.held_out
    if count is None:
        fewest = max(FEWEST_HELD_OUT, minimum)
        count = 0 if recipe.dev else min(HELD_OUT_ROWS, len(corpus) // HELD_OUT_PART, limit)
        count = count if count >= fewest else 0
        full_batches = count - count % recipe.batch_size  # an incomplete batch is not scored
        count = full_batches if full_batches >= fewest else count
    elif count > limit:
        raise RecipeError(
            f"held_out is {count:,}, but the corpus has {len(corpus):,} rows, and a batch of {recipe.batch_size:,} "
            f"must remain; write {max(0, limit):,} at most"
        )
    if 0 < count < minimum:
        raise RecipeError(f"held_out is {count}, but a loss needs {minimum} rows or more; raise it, or write 0")
    if not count:
        return corpus
    whole = isinstance(recipe, RankingRecipe)
    remaining = corpus.hold_out(count, recipe.seed, whole=whole, linked=recipe.next_sentences)
    if len(remaining.held_out) < minimum:  # a query's rows are held out together
        if recipe.held_out is None:
            return corpus
        raise RecipeError(
            f"held_out is {count}, but a query is held out with all its rows, and these are more; raise it, or write 0"
        )
    if len(remaining) >= recipe.batch_size:
        return remaining
    if recipe.held_out is None:  # the corpus is a few texts, repeated
        return corpus
    raise CorpusError(f"{remaining}: fewer than one batch of {recipe.batch_size}; add text, or write held_out = 0")


def _check_weighted_files(corpus: Corpus, recipe: Recipe) -> None:
    """Raises CorpusError if a file that has a weight has no rows."""
    files_with_rows = set(corpus.files().tolist()) if recipe.weights else set()
    for number, weight in enumerate(recipe.weights):
        if weight and number not in files_with_rows:
            raise CorpusError(
                f"{recipe.corpus[number]} has the weight {weight:g} and no sentence left to train on ({corpus}); write "
                "0, or check sentences, min_words, max_words"
            )


def _note_layers_behind(recipe: Recipe) -> None:
    """Print which layers of a sentence-transformers model are left out although the run reads it as the model does."""
    if not of_library(recipe.encoder) or not keeps_own_config(recipe.encoder, recipe):
        return
    if behind := layers_behind(recipe.encoder):
        console.print(
            f"note: {recipe.encoder} has layers after its pooling ({', '.join(behind)}), which a run cannot include: "
            "this run begins with the vectors before them"
        )


def _build(recipe: Recipe) -> Objective:
    """Load the encoder and build the method's objective, with its layers frozen and LoRA added as the recipe says."""
    set_seed(recipe.seed)
    kind_of(recipe.encoder)  # raises RunError for a folder that is not a model
    encoder = SentenceEncoder.load(
        recipe.encoder,
        template=recipe.template,
        pooling=recipe.pooling,
        final_period=recipe.final_period,
        denoising=False,  # even if the parent denoises; a method that serves denoising sets it
    )
    _keep_fitting_templates(encoder)
    _note_layers_behind(recipe)
    had_head = encoder.head is not None
    objective = objective_of(recipe.method)(encoder, recipe)
    objective.adds_head = objective.encoder.head is not None and not had_head
    backbone = objective.encoder.backbone
    for model in objective.models() if recipe.compile else ():
        model.compile(dynamic=True)  # in place: the names of the weights do not change
    if recipe.lora_rank:
        add_lora(backbone, recipe.lora_rank, recipe.lora_alpha)
    if recipe.frozen_layers is not None:
        freeze_embeddings(backbone)
        first_layers(backbone, recipe.frozen_layers).requires_grad_(recipe.frozen_share < 1)
    return objective


def _keep_fitting_templates(encoder: SentenceEncoder) -> None:
    """Drop the parent's named templates that do not suit this pooling, because they lack [MASK] or have one."""
    fitting = {}
    for name, template in encoder.config.templates.items():
        try:
            Template.parse(template, encoder.config.pooling)
        except TemplateError as error:
            console.print(f"skipped the parent's template {name!r}: {error}")
        else:
            fitting[name] = template
    encoder.reconfigure(encoder.config.model_copy(update={"templates": fitting}))
