"""transformers' Trainer around an objective: named loss parts in the log, dev data as evaluation, a soft Ctrl-C."""

import math
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import Sampler
from tqdm import tqdm
from transformers import (
    EarlyStoppingCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from training.cached import backward_in_chunks
from training.dev import DevData
from training.encoder import quiet
from training.errors import RunError
from training.gather import average_gradients
from training.objective import Objective
from training.recipe import Recipe
from training.run import Run
from training.sampler import LengthGroupedSampler, NeighbourSampler

__all__ = ["DEV", "Interrupt", "Journal", "ObjectiveTrainer", "OwnDropout", "Patience", "training_arguments"]

DEV = "eval_dev_"
UNSHOWN = ("epoch", "total_flos")


class ObjectiveTrainer(Trainer):
    """Trains `objective`; its evaluation is what the encoder scores on the dev data.

    The best weights are kept in the file `best`, apart from the checkpoints, which hold the optimiser's state too.
    """

    def __init__(self, objective: Objective, dev: DevData | None, best: Path | None = None, **keywords: Any) -> None:
        super().__init__(model=objective, eval_dataset=dev, data_collator=objective.views, **keywords)
        self.remove_callback(ProgressCallback)
        self.add_callback(Progress())
        self.objective = objective
        self.dev = dev
        self.best = best
        self._parts: list[dict[str, Tensor]] = []

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        recipe = self.objective.recipe
        if recipe.neighbours > 1:
            return NeighbourSampler(len(self.train_dataset), recipe.neighbours, recipe.seed)
        if not recipe.group_by_length:
            return super()._get_train_sampler(train_dataset)
        lengths = [sum(map(len, row)) for row in self.train_dataset]  # characters: near enough
        return LengthGroupedSampler(lengths, recipe.batch_size, recipe.seed)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return self.objective.recipe.batch_size  # of all processes; the Trainer would multiply by their number

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        outputs = model(**inputs)
        loss = outputs.pop("loss")
        self._parts.append(outputs)
        return loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Tensor:
        """Forward and backward of one batch, by GradCache where the recipe asks for it."""
        size = getattr(self.objective.recipe, "mini_batch_size", None)
        if size is None:
            return super().training_step(model, inputs, *arguments, **keywords)
        model.train()
        # around DistributedDataParallel, which would count on one pass; so its part is done here
        outputs = backward_in_chunks(self.objective, self._prepare_inputs(inputs), size, self.accelerator.autocast)
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
                    f"the loss is {logs['loss']} at step {self.state.global_step}, the gradient's norm "
                    f"{logs.get('grad_norm')}; lower learning_rate, or use precision = 'fp32'"
                )
        super().log(logs, start_time)

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        with quiet():  # it would tell of checkpoints less than a second apart
            super()._save_checkpoint(*arguments, **keywords)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        assert self.dev is not None, "evaluation is asked for only where there is dev data. This is a bug."
        scores = [self.dev.score(self.objective.encoder.embed) if self.is_world_process_zero() else {}]
        broadcast_object_list(scores)  # so that all agree which checkpoint is best
        metrics = {f"{DEV}{name}": score for name, score in scores[0].items()}
        self.log(dict(metrics))
        if self.best and self.state.global_step and self._is_best(metrics) and self.is_world_process_zero():
            partial = self.best.with_suffix(".partial")
            save_model(self.objective, str(partial))
            partial.replace(self.best)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def load_best(self) -> None:
        """Take the best weights, where dev data chose some; else those of the last step stay."""
        if self.best and self.best.is_file():
            load_model(self.objective, self.best)

    def _is_best(self, metrics: dict[str, float]) -> bool:
        """Whether they are better than all before; the Trainer notes it after the evaluation."""
        former = self.state.best_metric
        return former is None or metrics[self.args.metric_for_best_model] > former


class Patience(EarlyStoppingCallback):
    """Without the warning that the Trainer itself does not keep the best checkpoint: `best` does."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        pass


class Progress(ProgressCallback):
    """On stderr a line a log, and on a terminal a bar below."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        self.current_step = 0
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=None)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        figures = {name: value for name, value in (logs or {}).items() if name not in UNSHOWN}
        if self.training_bar is None or "train_runtime" in figures:  # that one sums up
            return
        line = ", ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in figures.items())
        self.training_bar.write(f"step {state.global_step}: {line}", file=sys.stderr)


class Journal(TrainerCallback):
    """Writes each logged entry to the run's log.jsonl, in the first process."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if state.is_world_process_zero:
            self.run.log({"step": state.global_step, **(logs or {})})


class OwnDropout(TrainerCallback):
    """Gives every process but the first a random stream of its own; a resumed one finds its state in the checkpoint."""

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if args.process_index:
            set_seed(args.seed + (args.process_index << 16))


class Interrupt(TrainerCallback):
    """Turns Ctrl-C into: finish the step, save a checkpoint, stop. A second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._former: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._former = signal.signal(signal.SIGINT, self._ask)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if self.asked:
            control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, *_: Any, **__: Any) -> None:
        signal.signal(signal.SIGINT, self._former)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._former)


def training_arguments(recipe: Recipe, run: Run, chooser: str | None, resumed: bool = False) -> TrainingArguments:
    """A recipe in the Trainer's words. One seed for all; the last, short batch of an epoch is dropped.

    `chooser` is the dev figure that chooses a checkpoint; None without dev data.

    Under torchrun each batch is split, so that the processes together see what one would see alone.
    """
    parts = getattr(recipe, "accumulation_steps", 1)
    return TrainingArguments(
        output_dir=str(run.path),
        accelerator_config={"split_batches": True},
        per_device_train_batch_size=recipe.batch_size // parts,
        gradient_accumulation_steps=parts,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps or -1,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="polynomial",
        lr_scheduler_kwargs={"lr_end": recipe.end_learning_rate, "power": 1.0},  # linear
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        adam_beta2=recipe.adam_beta2,
        max_grad_norm=recipe.max_grad_norm,
        optim="adamw_torch_fused",  # one pass over the weights: on a CPU 7 times as fast
        bf16=recipe.precision == "bf16",
        tf32=True if recipe.precision == "tf32" else None,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,  # objectives use all they own
        seed=recipe.seed,
        dataloader_drop_last=True,
        dataloader_num_workers=recipe.workers,
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
        metric_for_best_model=DEV + chooser if chooser else None,
        greater_is_better=True if chooser else None,
        report_to=[],
    )
