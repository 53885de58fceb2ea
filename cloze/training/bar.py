"""The progress bar of all commands that train or evaluate, and the console for their messages.

Both write to stderr. On a terminal, work that takes longer than two seconds shows a bar with the time left, in the
first process only; the bar disappears when the work is done. Training silences the console of the other processes.
"""

import os
from functools import partial
from typing import Final

from rich.console import Console
from tqdm import tqdm

PATIENCE: Final = 2.0  # seconds
FIRST: Final = os.environ.get("RANK", "0") == "0"  # torchrun sets it

console: Final = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
bar: Final = partial(tqdm, delay=PATIENCE, leave=False, dynamic_ncols=True, disable=None if FIRST else True)
