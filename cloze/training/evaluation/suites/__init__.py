"""The suites by name. A new suite needs a file with a function `tasks`, a line here and a name in `options.py`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from cloze.training.errors import RunError
from cloze.training.evaluation.options import DEFAULT, OWN
from cloze.training.evaluation.sts import DEV_TASKS, STS_TASKS
from cloze.training.evaluation.suites import (
    baselines,
    cost,
    maps,
    neighbours,
    own,
    probes,
    retrieval,
    space,
    sts,
    transfer,
)
from cloze.training.evaluation.task import Task

SUITES: Final[dict[str, Callable[[Path | None, Sequence[Path]], list[Task]]]] = {
    "sts": sts.tasks,
    "retrieval": retrieval.tasks,
    "neighbours": neighbours.tasks,
    "pairs": own.pair_tasks,
    "triplets": own.triplet_tasks,
    "labels": own.label_tasks,
    "probes": probes.tasks,
    "space": space.tasks,
    "maps": maps.tasks,
    "transfer": transfer.tasks,
    "transfer-fast": transfer.fast_tasks,
    "cost": cost.tasks,
    "baselines": baselines.tasks,
}
"""Name -> function that reads its tasks from the data folder, if there is one, and from own files or folders."""


def load_suites(
    data: Path | None, names: Sequence[str] = (), own: Mapping[str, Sequence[Path]] | None = None
) -> list[Task]:
    """The tasks of the named suites, by default `DEFAULT`, and of the suites for which there is own data.

    Raises CorpusError, and RunError if a name is unknown or a suite has no data.
    """
    files = {name: paths for name, paths in (own or {}).items() if paths}
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise RunError(f"--suite is {unknown[0]!r}; it is one of {', '.join(SUITES)}")
    wanted = list(dict.fromkeys([*(names or (DEFAULT if data else ())), *files]))
    if not wanted:
        options = ", ".join(f"--{name}" for name in OWN)
        raise RunError(f"there is nothing to score: give --data DIR, or data of your own with {options}")
    tasks: list[Task] = []
    for name in wanted:
        _refuse_known_names(name, files.get(name, ()))
        suite_tasks = SUITES[name](data, files.get(name, ()))
        if not suite_tasks and name in names:
            needed = f"--{name} PATH" if name in OWN else "--data DIR"
            raise RunError(f"the suite {name} has no data; give {needed}")
        _refuse_same_names(name, [task.name for task in suite_tasks])
        tasks += suite_tasks
    return tasks


def _refuse_known_names(suite: str, own: Sequence[Path]) -> None:
    """Refuse own sets with names of known ones: figures of similarity and search are named by the set alone."""
    for path in own if suite in ("sts", "retrieval") else ():
        name = path.resolve().name
        if name in (*STS_TASKS, *DEV_TASKS, "Avg.") or name.partition(" ")[0] in SUITES:
            raise RunError(f"{path}: {name!r} is the name of one of Cloze's own sets or suites; rename the folder")


def _refuse_same_names(suite: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise RunError(f"two sets of the suite {suite} have the name {name!r}; rename one of the files or folders")
