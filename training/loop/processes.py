"""The processes of one run, and the console on which the first of them prints."""

import torch
from accelerate import PartialState
from rich.console import Console

__all__ = ["console", "processes"]

console = Console(stderr=True, soft_wrap=True, highlight=False)


def processes() -> PartialState:
    """This process among those that torchrun started; the first call joins them. Without torchrun there is one."""
    return PartialState(cpu=not torch.cuda.is_available())
