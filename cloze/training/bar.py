"""The progress bar of all commands that train or evaluate: with the time left, and gone when the work is done.

It is on stderr if that is a terminal, in the first process of several, for work that takes longer than two seconds.
"""

import os
from functools import partial
from typing import Final

from tqdm import tqdm

__all__ = ["bar"]

PATIENCE: Final = 2.0  # seconds
FIRST: Final = os.environ.get("RANK", "0") == "0"  # torchrun sets it

bar: Final = partial(tqdm, delay=PATIENCE, leave=False, dynamic_ncols=True, disable=None if FIRST else True)
