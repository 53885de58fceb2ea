"""cloze.training.fit where processes kill themselves once, each at the step that DIES, JSON, has for its rank, if any.

One that has died leaves a file with its rank in the folder DEAD, and goes on when torchrun starts it again.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from cloze.training.fit import main
from cloze.training.loop import run as loop
from cloze.training.loop.callbacks import Journal

RANK = os.environ.get("RANK", "0")
STEP = json.loads(os.environ["DIES"]).get(RANK)
DEAD = Path(os.environ["DEAD"], RANK)


class Dying(Journal):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == STEP and not DEAD.exists():
            DEAD.touch()
            os.kill(os.getpid(), signal.SIGKILL)


loop.Journal = Dying  # type: ignore[misc]
sys.exit(main(sys.argv[1:]))
