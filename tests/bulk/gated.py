"""`python -m gated IN OUT ...`: a job of cloze bulk whose workers complete a part only when the test lets them.

The file `let` in the folder OUT.gate has the number of parts that may be complete. A worker takes one of so many
tickets before it embeds a part.
"""

import sys
import time
from pathlib import Path

from cloze.command import run
from cloze.service.bulk import job
from cloze.service.bulk.__main__ import main
from cloze.service.bulk.source import Part


def take_ticket(out: Path) -> None:
    folder = Path(f"{out}.gate")
    while True:
        for number in range(int((folder / "let").read_text())):
            try:
                (folder / str(number)).touch(exist_ok=False)
            except FileExistsError:
                continue
            return
        time.sleep(0.01)


class Gated_Embedder(job._Embedder):
    def _complete(self, part: Part) -> job.Progress:
        take_ticket(Path(self._output.root))
        return super()._complete(part)


if __name__ == "__main__":
    import gated

    job._Embedder = gated.Gated_Embedder  # type: ignore[misc]
    sys.exit(run(main))
