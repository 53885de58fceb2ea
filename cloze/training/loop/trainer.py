"""transformers' Trainer around an objective: a recipe in its terms, named losses, evaluations that choose weights."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.utils import broadcast_object_list
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from cloze.encoding.files import replacing
from cloze.training.data.corpus import Corpus
from cloze.training.data.sampler import (
    DistinctSampler,
    EpochSampler,
    LengthGroupedSampler,
    RandomSampler,
    WeightedSampler,
    WholeBatches,
)
from cloze.training.errors import RunError
from cloze.training.loop.gradient_cache import backward_in_chunks
from cloze.training.methods.contrastive import BatchObjective
from cloze.training.methods.gather import average_gradients
from cloze.training.methods.objective import Objective
from cloze.training.model.pretrained import quiet
from cloze.training.recipes.recipe import Recipe

DEV, HELD_OUT = "eval_dev_", "eval_held_out_"  # prefixes of the names of figures in the log
TRACKERS = ("wandb", "mlflow")  # the Trainer sends its log to them; TensorBoard's log is in the run folder

LESS_MEMORY: Final = {"mini_batch_size": "a lower mini_batch_size", "accumulation_steps": "a higher accumulation_steps"}

Figures = Callable[[Objective, Mapping[str, float]], dict[str, float]]
"""The figures of an evaluation by their names in the log, given the figures before the first step, empty at first.

All processes call it, and the figures of the first process count.
"""


def training_arguments(recipe: Recipe, folder: Path, chooser: str | None, resumed: bool = False) -> TrainingArguments:
    """The recipe as the Trainer's arguments. One seed is used for everything. An epoch's last, short batch is dropped.

    `chooser` is the figure in the log that chooses a checkpoint: the highest score on dev data, or the lowest loss on
    held-out rows; None without either. Under torchrun each batch is split, so that all processes together see what a
    single process would see.
    """
    return TrainingArguments(
        output_dir=str(folder),
        accelerator_config={"split_batches": True, "non_blocking": torch.cuda.is_available()},
        per_device_train_batch_size=recipe.batch_size // recipe.parts,
        gradient_accumulation_steps=recipe.parts,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps or -1,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        adam_beta2=recipe.adam_beta2,
        optim="adamw_torch_fused",  # one pass over the weights: on a CPU 7 times as fast
        bf16=recipe.precision == "bf16",
        tf32=True if recipe.precision == "tf32" else None,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,  # objectives use all of their parameters
        seed=recipe.seed,
        dataloader_drop_last=True,
        dataloader_num_workers=recipe.workers or 0,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        logging_strategy="steps",
        logging_steps=recipe.log_steps,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if chooser else "no",
        eval_steps=recipe.eval_steps,
        eval_on_start=bool(chooser) and not resumed,
        save_strategy="steps",
        save_steps=recipe.save_steps or recipe.eval_steps,
        save_total_limit=2,
        restore_callback_states_from_checkpoint=recipe.patience is not None,
        metric_for_best_model=chooser,
        greater_is_better=chooser.startswith(DEV) if chooser else None,
        report_to=[name for name in recipe.report_to if name in TRACKERS],
        run_name=folder.resolve().name,
    )


class ObjectiveTrainer(Trainer):
    """Trains `objective`. An evaluation calls `figures` for the log and for the choice of a checkpoint.

    The best weights are kept in the file `best`, separate from the checkpoints, which also hold the optimiser's state.
    """

    objective: Objective

    def __init__(
        self,
        objective: Objective,
        corpus: Corpus,
        arguments: TrainingArguments,
        figures: Figures | None = None,
        best: Path | None = None,
    ) -> None:
        super().__init__(
            model=objective,
            args=arguments,
            train_dataset=corpus,
            eval_dataset=None if figures is None else (),  # the Trainer requires one, but `evaluate` does not read it
            data_collator=objective.views,
        )
        self.remove_callback(ProgressCallback)
        self.objective = objective
        self.corpus = corpus
        self.figures = figures
        self.best = best
        self._parts: list[dict[str, Tensor]] = []

    def train(self, *arguments: Any, **keywords: Any) -> TrainOutput:
        """Raises RunError if a step needs more memory than the GPU has, or if the loss is not finite."""
        try:
            return super().train(*arguments, **keywords)
        except torch.OutOfMemoryError as error:
            recipe = self.objective.recipe
            keys = [words for key, words in LESS_MEMORY.items() if key in type(recipe).model_fields]
            if getattr(recipe, "projector", None) == "batchnorm":  # which must see all rows of a batch
                keys.remove(LESS_MEMORY["mini_batch_size"])
            reason = str(error).partition(" GPU ")[0].rstrip(".")  # the rest is about this process and torch's settings
            raise RunError(f"{reason}; choose {' or '.join(['a lower batch_size', *keys])}") from error

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> None:
        """Train nothing if a resumed run has no step left: the Trainer would train one step before it checks."""
        patience = [each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
        out_of_patience = any(each.early_stopping_patience_counter >= each.early_stopping_patience for each in patience)
        if out_of_patience or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*arguments, **keywords)  # type: ignore[no-untyped-call]

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        order, recipe = self._order(), self.objective.recipe
        return WholeBatches(order, recipe.batch_size) if recipe.parts > 1 else order

    def _order(self) -> EpochSampler:
        recipe = self.objective.recipe
        if recipe.distinct_texts:
            return DistinctSampler(self.corpus.rows, recipe.batch_size, recipe.seed)
        if recipe.weights:
            return WeightedSampler(self.corpus.files(), recipe.weights, recipe.seed)
        if not recipe.group_by_length:
            return RandomSampler(len(self.corpus), recipe.seed)
        lengths = [sum(map(len, row)) for row in self.corpus.rows]  # characters are precise enough
        return LengthGroupedSampler(lengths, recipe.batch_size, recipe.seed)

    def get_train_dataloader(self) -> Any:
        loader: Any = super().get_train_dataloader()
        batches = loader.batch_sampler
        # accelerate's shard of the batches has no sampler, so a resumed epoch would have the order of the first epoch
        loader.set_sampler(getattr(batches, "batch_sampler", batches).sampler)
        return loader

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return int(self.objective.recipe.batch_size)  # of all processes; the Trainer would multiply it by their number

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        outputs: dict[str, Tensor] = model(**inputs)
        loss = outputs.pop("loss")
        self._parts.append(outputs)
        return loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Tensor:
        """Forward and backward pass of one batch, with GradCache if the recipe sets `mini_batch_size`."""
        size = self.objective.recipe.chunk_rows
        if size is None:
            return super().training_step(model, inputs, *arguments, **keywords)
        assert isinstance(self.objective, BatchObjective), (
            "only recipes of contrastive methods have this key. This is a bug."
        )
        model.train()
        # DistributedDataParallel expects one pass, so it is bypassed and its gradients are averaged here
        views: dict[str, Any] = self._prepare_inputs(inputs)
        outputs = backward_in_chunks(self.objective, views, size, self.accelerator.autocast)
        average_gradients(self.objective)
        loss = outputs.pop("loss")
        self._parts.append(outputs)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._parts:
            parts, self._parts = self._parts, []
            for name in parts[0]:
                logs[name] = torch.stack([part[name] for part in parts]).mean().item()
            if not math.isfinite(logs["loss"] + logs.get("grad_norm", 0.0)):
                raise RunError(
                    f"the loss is {logs['loss']} at step {self.state.global_step}, and the gradient's norm is "
                    f"{logs.get('grad_norm')}; lower learning_rate, or use precision = 'fp32'"
                )
        super().log(logs, start_time)

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        with quiet():  # it would warn about checkpoints less than a second apart
            super()._save_checkpoint(*arguments, **keywords)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state, and wait until every process has saved its own: trainer_state.json is written next."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        assert self.figures is not None, "evaluation without figures is switched off in the arguments. This is a bug."
        start = next((entry for entry in self.state.log_history if entry["step"] == 0), {})
        shared_metrics = [self.figures(self.objective, start)]
        broadcast_object_list(shared_metrics)  # so that all processes agree which checkpoint is best
        (metrics,) = shared_metrics
        self.log(dict(metrics))
        score = metrics[str(self.args.metric_for_best_model)]
        if self.best and self._is_best(score) and self.is_world_process_zero():
            with replacing(self.best) as partial:
                save_model(self.objective, str(partial), {"step": str(self.state.global_step), "metric": repr(score)})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.state.global_step == 0:  # the Trainer records only later steps, which win a tie with this one
            worst = -math.inf if self.args.greater_is_better else math.inf
            self.state.best_metric, self.state.best_global_step = math.nextafter(score, worst), 0
        return metrics

    def load_best(self) -> None:
        """Load the best weights if an evaluation chose some; otherwise keep those of the last step.

        A killed run may have saved the best weights after its last checkpoint, in an evaluation whose score was worse
        when the resumed run repeated it. So the file itself says which step they are from.
        """
        if self.best and self.best.is_file():
            load_model(self.objective, self.best)
            with safe_open(self.best, "pt") as file:
                about = file.metadata() or {}
            if "step" in about:  # missing in a run that version 0.2 began
                self.state.best_global_step, self.state.best_metric = int(about["step"]), float(about["metric"])

    def _is_best(self, score: float) -> bool:
        """Whether the score is better than all earlier ones; the Trainer records it after the evaluation."""
        former = self.state.best_metric
        return former is None or (score > former if self.args.greater_is_better else score < former)
