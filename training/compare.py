"""python -m training.compare A B C --data DIR: models side by side, and which differences are more than chance."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import CliPositionalArg, CliVariadicArg

from encoding.command import program, run
from training.errors import RunError
from training.evaluate.bootstrap import Difference, compared
from training.evaluate.inputs import ScoringOptions, fitting, progress, subjects
from training.evaluate.measures import Score
from training.evaluate.suites import HELP, NOT_COMPARED, load_suites
from training.evaluate.tables import print_table
from training.evaluate.task import Task, score_tasks
from training.result_file import check_new_file

__all__ = ["CompareOptions", "main"]


class CompareOptions(ScoringOptions):
    """Compare models with the first one: the difference on each set, with its 95 % interval.

    Sets that `evaluate` has scored are read from the cache. The options of a model, such as --template, are used for
    the encoders that have no configuration of their own.
    """

    models: CliPositionalArg[list[str]] = Field(
        description="two or more runs, bundles, encoders, servers, or files that evaluate --json wrote"
    )
    suite: CliVariadicArg[list[str]] = Field([], description=HELP)
    resamples: Annotated[int, Field(ge=100)] = Field(1000, description="drawings of the bootstrap")
    out: Path | None = Field(None, alias="json", description="file to write the differences to as well")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = CompareOptions.read(sys.argv[1:] if arguments is None else arguments, program("training.compare"))
    if options.out:
        check_new_file(options.out)
    tasks: list[Task] = []
    if not all(_is_file(model) for model in options.models):
        if without := [name for name in options.suite if name in NOT_COMPARED]:
            raise RunError(f"an interval needs figures of many items, which {without[0]} does not have: use evaluate")
        tasks = load_suites(options.data, options.suite, options.own)
    scores: dict[str, list[Score]] = {}
    for model in options.models:
        found = _read(Path(model)) if _is_file(model) else _score(model, tasks, options)
        if twice := found.keys() & scores.keys():
            raise RunError(f"{min(twice)} is named twice; name each model once")
        scores |= found
    if len(scores) < 2:
        raise RunError(f"{', '.join(scores)} is one model; give two or more to compare")
    differences = compared(scores, options.resamples)
    _show(differences)
    if options.out:
        content = {"first": next(iter(scores)), "resamples": options.resamples}
        rows = {"differences": [each.as_json() for each in differences]}
        options.out.write_text(json.dumps(content | rows, indent=2) + "\n", encoding="utf-8")


def _is_file(model: str) -> bool:
    return model.endswith(".json")


def _score(model: str, tasks: Sequence[Task], options: ScoringOptions) -> dict[str, list[Score]]:
    """The scores of a model, or of each precision of a bundle."""
    found = {}
    for subject in subjects(model, fitting(model, options)):
        name = f"{model} {subject.name}"
        found[name] = score_tasks(subject, tasks, progress(subject), options.score_cache, options.fresh)
    return found


def _read(file: Path) -> dict[str, list[Score]]:
    """The models of a file that `evaluate --json` wrote. Raises RunError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found: dict[str, list[Score]] = {}
        for record in content["results"]:
            name = f"{file.with_suffix('')} {record.pop('model')}"
            found.setdefault(name, []).append(Score.from_json(record))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{file} cannot be read as the figures of evaluate --json ({error!r}); write it again"
        ) from error
    return found


def _show(found: Sequence[Difference]) -> None:
    """A table per suite, one row per set and model."""
    for suite in dict.fromkeys(each.suite for each in found):
        rows = []
        task = ""
        for each in (each for each in found if each.suite == suite):
            rows.append((each.task if each.task != task else "", each.model, each.metric, *_cells(each)))
            task = each.task
        columns = ("model", "metric", "figure", "difference", "95 % interval", "verdict")
        print_table(suite, columns, rows)


def _cells(each: Difference) -> tuple[str, ...]:
    decimals = 4 if each.suite == "space" else 2
    value = f"{each.value:.{decimals}f}"
    if each.difference is None:
        return value, "", "", ""
    interval = f"{each.low:+.{decimals}f} to {each.high:+.{decimals}f}"
    return value, f"{each.difference:+.{decimals}f}", interval, each.verdict


if __name__ == "__main__":
    sys.exit(run(main))
