"""A task of a suite, the digest of a task's data, and the cache of finished tasks."""

import hashlib
import json
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Final, Self

from training.errors import RunError
from training.evaluate.measures import Score
from training.evaluate.subject import Subject

__all__ = ["Follow", "ScoreCache", "Task", "score_tasks"]

VERSION: Final = 2  # raise it when a suite computes another figure of the same data

Follow = Callable[[list[str]], Iterable[str]]
"""Wraps the names of what is scored, to show progress."""


@dataclass(frozen=True)
class Task(ABC):
    """A set of data and how it is scored. A subclass's fields are plain data and everything that decides its scores."""

    suite: ClassVar[str]
    timed: ClassVar[bool] = False  # whether it measures the embedding itself, so that no vector may be remembered
    name: str

    @abstractmethod
    def run(self, subject: Subject) -> list[Score]:
        """The scores; the first is the one that compares models."""

    def obstacle(self, subject: Subject) -> str | None:
        """Why this subject cannot be scored at all, in one line; None if it can."""
        return None

    @cached_property
    def digest(self) -> str:
        content = json.dumps(
            [VERSION, self.suite, type(self).__name__, asdict(self)], ensure_ascii=False, sort_keys=True
        )
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True)
class ScoreCache:
    """A folder with one file per finished task, in a folder per model. Each file appears when it is complete."""

    folder: Path

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Make the folder. Raises RunError if nothing can be written to it, before anything is scored."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise RunError(
                f"--cache {folder} cannot be written to ({error.strerror}); choose another folder"
            ) from error
        return cls(folder)

    def find(self, subject: Subject, task: Task) -> list[Score] | None:
        """The scores of a finished task; None if there are none, or if the file cannot be read."""
        try:
            found = json.loads(self._file(subject, task).read_text(encoding="utf-8"))
            return [Score.from_json(each) for each in found]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, subject: Subject, task: Task, scores: Sequence[Score]) -> None:
        file = self._file(subject, task)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as part:
            json.dump([score.as_json() for score in scores], part)
        os.replace(part.name, file)

    def _file(self, subject: Subject, task: Task) -> Path:
        return self.folder / subject.digest[:16] / f"{task.suite}-{task.digest[:16]}.json"


def score_tasks(
    subject: Subject, tasks: Sequence[Task], follow: Follow = iter, cache: ScoreCache | None = None, fresh: bool = False
) -> list[Score]:
    """All scores, in the tasks' order. Finished tasks are read from the cache, unless `fresh`, and kept in it.

    Timed tasks are neither: the digests do not know the device, or the machine and the settings of a server.
    Tasks that this subject cannot have are left out, with a line on stderr. Raises RunError if none is left.
    """
    obstacles = list(dict.fromkeys(reason for task in tasks if (reason := task.obstacle(subject))))
    tasks = [task for task in tasks if not task.obstacle(subject)]
    if obstacles and not tasks:
        raise RunError(obstacles[0])
    for reason in obstacles:
        print(f"left out: {reason}", file=sys.stderr)
    scores: list[Score] = []
    remembering = subject.remembering()
    for task, _ in zip(tasks, follow([task.name for task in tasks]), strict=True):
        kept = cache and not task.timed
        found = cache.find(subject, task) if cache and kept and not fresh else None
        if found is None:
            found = task.run(subject if task.timed else remembering)
            if cache and kept:
                cache.keep(subject, task, found)
        scores += [replace(score, data=task.digest[:16]) for score in found]
    return scores
