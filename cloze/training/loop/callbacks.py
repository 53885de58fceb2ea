"""The Trainer's callbacks: progress, the run's log, random streams, early stopping, and a soft Ctrl-C."""

import signal
import sys
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any, Final

from accelerate.utils import broadcast_object_list
from tqdm import tqdm
from transformers import (
    EarlyStoppingCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from cloze.training.bar import console
from cloze.training.run_folder import Run

SAVE_SECONDS: Final = 300  # between checkpoints, which hold the weights three times
UNSHOWN = ("epoch", "total_flos")


class Patience(EarlyStoppingCallback):
    """Early stopping without the Trainer's warning that the best checkpoint is not kept: the file `best` holds it."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        pass


class Progress(ProgressCallback):
    """One line on stderr for each log entry, and on a terminal a progress bar below."""

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
        if self.training_bar is None or console.quiet or "train_runtime" in figures:  # the summary at the end
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
    """Gives every process except the first its own random stream; a resumed run restores it from the checkpoint.

    Two runs share a stream only if their seeds differ by a multiple of 65,536.
    """

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if args.process_index:
            set_seed(args.seed + (args.process_index << 16))


class Seldom(TrainerCallback):
    """Skips a checkpoint less than SAVE_SECONDS after the last one, except at the last step."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._saved = clock()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if control.should_save and state.global_step < state.max_steps:
            due = [self._clock() - self._saved >= SAVE_SECONDS]
            broadcast_object_list(due)  # the clocks of several processes differ
            (control.should_save,) = due
        if control.should_save:
            self._saved = self._clock()
        return control


class Interrupt(TrainerCallback):
    """On Ctrl-C finish the step, save a checkpoint and stop. A second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.pressed = False
        self._former: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._former = signal.signal(signal.SIGINT, self._ask)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if self.pressed:
            control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, *_: Any, **__: Any) -> None:
        signal.signal(signal.SIGINT, self._former)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, self._former)
