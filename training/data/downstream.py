"""The folder of SentEval's data, with one folder per set."""

from pathlib import Path
from typing import Final

from training.errors import CorpusError

__all__ = ["find_downstream", "present"]

LAYOUTS: Final = ("senteval/downstream", "downstream", ".")


def find_downstream(data: str | Path) -> Path:
    """The folder with `STS/` and `SICK/` in it: `data` itself, or below it as `downstream` or `senteval/downstream`.

    Raises CorpusError if there is none.
    """
    for layout in LAYOUTS:
        if (Path(data) / layout / "STS").is_dir():
            return Path(data) / layout
    raise CorpusError(
        f"{data} has no STS folder, nor has senteval/downstream or downstream in it; give SentEval's data folder "
        "(after its get_transfer_data.bash): the folder that holds STS and SICK, or one above it"
    )


def present(path: Path) -> Path:
    """The path of a file of SentEval's data. Raises CorpusError if it is missing."""
    if not path.is_file():
        raise CorpusError(f"{path} is missing; get SentEval's data again (its get_transfer_data.bash)")
    return path
