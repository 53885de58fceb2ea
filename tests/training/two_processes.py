"""A function in two fresh processes that gloo joins, as torchrun would start them."""

import gc
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
from patience import PATIENCE
from torch import distributed, multiprocessing


def in_two(function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns in each; where one fails, the other is ended and this raises."""
    set_forkserver_preload(["transformers.trainer"])  # imported once, with torch, for all that this worker starts
    multiprocessing.start_processes(
        _start, (function, folder, arguments), nprocs=2, daemon=True, start_method="forkserver"
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def _start(rank: int, function: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("error")
    gc.freeze()  # training collects garbage, and torch leaves much to look through
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", timedelta(seconds=PATIENCE)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)
    torch.save(function(rank, *arguments), folder / f"{rank}.pt")
    if distributed.is_initialized():  # a command leaves the group itself
        distributed.destroy_process_group()
