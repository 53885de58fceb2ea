"""The processes of one run, and the memory that they keep."""

import os
import time
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from cloze.machine import mallopt
from cloze.training.errors import RunError

M_TRIM_THRESHOLD: Final = -1  # glibc's mallopt(3)
M_MMAP_MAX: Final = -4
LARGEST: Final = 2**31 - 1

PATIENCE = 60.0  # seconds after which a network file system shows a new file to all nodes


def keep_memory() -> None:
    """Tell glibc to map no tensor separately and to return no memory to the system before the process ends.

    Otherwise the system maps, clears and unmaps each large tensor in each step.
    """
    mallopt({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: LARGEST})


def processes() -> PartialState:
    """The state of this process among those of torchrun; the first call joins them. Without torchrun there is one.

    Raises RunError if torchrun would restart them with the store that holds the addresses of the ended processes.
    """
    keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # github.com/pytorch/pytorch/issues/135712
    if restarts_itself() and keeps_store and os.environ["WORLD_SIZE"] != "1":
        raise RunError(
            "torchrun --max-restarts lets restarted processes connect to those that have ended; "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, with --rdzv-backend c10d or --standalone"
        )
    return PartialState(cpu=not torch.cuda.is_available())


def restarts_itself() -> bool:
    """Whether torchrun's --max-restarts starts this same command again when a process or a node is lost.

    An agent that replaces a lost one counts its restarts from 0, so the count does not say whether this is the first
    start.
    """
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def check_shared(folder: Path) -> None:
    """Raises RunError, in every process, unless all of them see the same folder."""
    group = processes()
    if group.num_processes == 1:
        return
    names = [f".{uuid4().hex}"]
    broadcast_object_list(names)
    mark = folder / names[0]
    if group.is_main_process:
        mark.touch()
    group.wait_for_everyone()
    deadline = time.monotonic() + PATIENCE
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = gather_object([mark.exists()])
    if group.is_main_process:
        mark.unlink()
    if not all(seen):
        unseeing = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
        raise RunError(
            f"{folder} is not the same folder for all processes (rank {unseeing} does not see it); "
            "choose an --out on a file system that all nodes share"
        )
