"""A recipe as the TrainingArguments of transformers."""

from pathlib import Path

import torch
from transformers import TrainingArguments

from training.recipes.keys import Recipe

__all__ = ["DEV", "HELD_OUT", "training_arguments"]

DEV, HELD_OUT = "eval_dev_", "eval_held_out_"  # before the names of figures in the log
TRACKERS = ("wandb", "mlflow")  # the Trainer sends its log there; TensorBoard's is the run folder's own


def training_arguments(recipe: Recipe, folder: Path, chooser: str | None, resumed: bool = False) -> TrainingArguments:
    """A recipe in the Trainer's terms. There is one seed for everything; the last, short batch of an epoch is dropped.

    `chooser` is the figure in the log that chooses a checkpoint: the highest of dev data, or the lowest loss of rows
    held out; None without either. Under torchrun each batch is split, so that the processes together see what one would
    see alone.
    """
    parts = getattr(recipe, "accumulation_steps", 1)
    return TrainingArguments(
        output_dir=str(folder),
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
        ddp_find_unused_parameters=False,  # objectives use all of their parameters
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
        metric_for_best_model=chooser,
        greater_is_better=chooser.startswith(DEV) if chooser else None,
        report_to=[name for name in recipe.report_to if name in TRACKERS],
        run_name=folder.resolve().name,
    )
