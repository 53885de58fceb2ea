"""The figures of one model: in the terminal, on its card, in a file and in a report."""

import json
from pathlib import Path

from cloze.encoding.bundle import load_to_change
from cloze.encoding.files import check_folder, check_new_file, write_whole
from cloze.training.encoder_source import kind_of
from cloze.training.errors import RunError
from cloze.training.evaluation.card import write_figures
from cloze.training.evaluation.options import EvaluateOptions
from cloze.training.evaluation.subjects import is_server, subjects
from cloze.training.evaluation.suites import load_suites
from cloze.training.evaluation.tables import figures, machines, show
from cloze.training.evaluation.task import Score, ScoreCache, score_tasks


def evaluate(options: EvaluateOptions) -> None:
    """Score the model that the options name. Raises ClozeError."""
    if options.out:
        check_new_file(options.out)
    if options.report:
        check_folder(options.report)
        # slow to import
        from cloze.training.evaluation.report.write import write_report

    if options.card and (is_server(options.path) or kind_of(options.path) != "bundle"):
        raise RunError(f"{options.path} is not a bundle, so it has no model card to write to; leave out --card")
    # Loaded before scoring: if the bundle is replaced meanwhile, the scores are not written to the new bundle's card.
    bundle = load_to_change(options.path) if options.card else None
    if options.beside and not options.card and not options.report:
        raise RunError("--beside is used only in the model card and the report; give --card or --report too")
    others, measured_on = dict[str, dict[str, float]](), dict[str, str]()
    for file in options.beside:
        written, their_machines = _written_figures(file)
        if twice := written.keys() & others.keys():
            raise RunError(f"{file} has {min(twice)}, which another file of --beside has too; omit one of the files")
        others |= written
        measured_on |= their_machines
    tasks = load_suites(options.data, options.suite, options.own)  # first: reading is quick and may fail
    scores: dict[str, list[Score]] = {}
    for subject in subjects(options.path, options):
        scores[subject.name] = score_tasks(subject, tasks, ScoreCache.open(options.cache), options.fresh)
    show(options.path, scores)
    model_figures = {name: figures(row) for name, row in scores.items()}
    measured_on |= machines(scores)
    if bundle:
        write_figures(bundle, model_figures, others, measured_on)
    if options.out:
        _write(options.out, options.path, scores)
    if options.report:
        write_report(options.report, options.path, scores, model_figures, others, measured_on)
        print(f"wrote the report to {options.report / 'report.html'}")


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
    write_whole(file, text + ',\n  "results": [\n' + ",\n".join(results) + "\n  ]\n}\n")


def _written_figures(file: Path) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Model -> figures, and model -> machine, from a file that `evaluate --json` wrote. Raises RunError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        name = Path(content["path"]).name
        model_figures = {
            f"{name}, {part}": {key: float(value) for key, value in row.items()}
            for part, row in content["scores"].items()
        }
        details = [(f"{name}, {result['model']}", result["details"]) for result in content.get("results", ())]
        return model_figures, {model: str(detail["machine"]) for model, detail in details if "machine" in detail}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file} cannot be read as figures of evaluate --json ({error!r}); write it again") from error
