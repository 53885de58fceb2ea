"""python -m training.evaluate PATH --data DIR: the figures of a run, a bundle, any encoder or a running server."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg, CliVariadicArg

from encoding.command import program
from evaluation.card import write_figures
from evaluation.subjects import ScoringOptions, progress, subjects
from evaluation.suites import HELP, load_suites
from evaluation.tables import figures, machines, show
from evaluation.task import Score, score_tasks
from training.errors import RunError
from training.result_file import check_new_file
from training.run_folder import kind_of

__all__ = ["EvaluateOptions", "main"]


class EvaluateOptions(ScoringOptions):
    """Print the figures of a run, a bundle, any encoder or a running server.

    A bundle's graphs are run as they are, one row per precision. Test sets compare models; the two development sets,
    printed apart, are the ones to choose by. Collections to search are those in the data's folder retrieval.
    """

    path: CliPositionalArg[str] = Field(
        description="a run, a bundle, an encoder's folder, a hub name, or a server's http://HOST:PORT"
    )
    suite: CliVariadicArg[list[str]] = Field([], description=HELP)
    out: Path | None = Field(None, alias="json", description="file to write the figures to as well")
    card: bool = Field(False, description="write the figures to the bundle's model card as well")
    beside: CliVariadicArg[list[Path]] = Field(
        [], description="for the card and the report: figures of other models, from files that --json wrote"
    )
    report: Path | None = Field(None, description="folder for a report: report.html, report.json and report.md")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = EvaluateOptions.read(sys.argv[1:] if arguments is None else arguments, program("training.evaluate"))
    if options.out:
        check_new_file(options.out)
    if options.report and options.report.is_file():
        raise RunError(f"{options.report} is a file; give a folder to --report")
    if options.card and kind_of(options.path) != "bundle":
        raise RunError(f"{options.path} is not a bundle, so it has no model card to write to; leave out --card")
    if options.beside and not options.card and not options.report:
        raise RunError("--beside is for the model card and the report; give --card or --report too")
    others, measured_on = dict[str, dict[str, float]](), dict[str, str]()
    for file in options.beside:
        written, their_machines = _written_figures(file)
        if twice := written.keys() & others.keys():
            raise RunError(f"{file} has {min(twice)}, as another file of --beside does; leave one of them out")
        others |= written
        measured_on |= their_machines
    tasks = load_suites(options.data, options.suite, options.own)  # first: reading is quick and may fail
    scores: dict[str, list[Score]] = {}
    for subject in subjects(options.path, options):
        scores[subject.name] = score_tasks(subject, tasks, progress(subject), options.score_cache, options.fresh)
    show(options.path, scores)
    found = {name: figures(row) for name, row in scores.items()}
    measured_on |= machines(scores)
    if options.card:
        write_figures(Path(options.path), found, others, measured_on)
    if options.out:
        _write(options.out, options.path, scores)
    if options.report:
        from evaluation.report.write import write_report  # here, because matplotlib takes a second

        write_report(options.report, options.path, scores, found, others, measured_on)
        print(f"{options.report / 'report.html'} has the report")


def _write(file: Path, path: str, scores: dict[str, list[Score]]) -> None:
    """JSON with one record per line, because a record may have thousands of items."""
    suites = list(dict.fromkeys(score.suite for row in scores.values() for score in row))
    head = {
        "path": path,
        "suites": suites,
        "scores": {name: figures(row) for name, row in scores.items()},
    }
    results = [json.dumps({"model": name} | score.as_json()) for name, row in scores.items() for score in row]
    text = json.dumps(head, indent=2).removesuffix("\n}")
    file.write_text(text + ',\n  "results": [\n' + ",\n".join(results) + "\n  ]\n}\n", encoding="utf-8")


def _written_figures(file: Path) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Model -> figures, and model -> machine, from a file that `evaluate --json` wrote. Raises RunError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        name = Path(content["path"]).name
        found = {
            f"{name}, {part}": {key: float(value) for key, value in row.items()}
            for part, row in content["scores"].items()
        }
        details = [(f"{name}, {each['model']}", each["details"]) for each in content.get("results", ())]
        return found, {model: str(each["machine"]) for model, each in details if "machine" in each}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file} cannot be read as figures of evaluate --json ({error!r}); write it again") from error
