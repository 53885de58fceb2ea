"""The figures on a bundle's model card: a section of the card, and metadata that the hub shows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import EvalResult, ModelCard
from yaml import YAMLError  # type: ignore[import-untyped]

from cloze.encoding.bundle import GRAPHS, PRECISIONS, Bundle, Precision, Provenance, changing
from cloze.training.errors import ExportError
from cloze.training.evaluation.sts import DEV_TASKS, STS_TASKS
from cloze.training.evaluation.suites.probes import FAR
from cloze.training.evaluation.tables import digits, machine_note, markdown_table
from cloze.training.evaluation.task import search_columns

TITLE: Final = "Figures"
SECTIONS: Final = {
    "pairs": "Own pairs: correlations ×100, or average precision ×100 and the best F1 ×100.",
    "triplets": "Own triplets.",
    "labels": "Own labelled texts: accuracy ×100 of two classifiers, and V-measure ×100 of k-means.",
    "neighbours": "Neighbours among the sentences of STS-B test, recall ×100.",
    "transfer": "Classification of the vectors by SentEval's protocol, accuracy ×100.",
    "transfer-fast": "Classification of the vectors by logistic regression, accuracy ×100.",
    "space": "Alignment (of pairs with a gold score above 4), uniformity and anisotropy on STS-B test; anisotropy on "
    "sentences of Wikipedia.",
    "cost": "Sentences of STS-B test per second.",  # the machine is added
}
"""The card's text for the suites that come after similarity and search."""
NOT_SHOWN: Final = ("maps", "baselines")
RIGHT: Final = " accuracy"
OWN_ENDING: Final = " graph"  # ends the names of the figures that are written here; the others are the user's
PROBES: Final = """\
What it does not understand: how often a text that says the same is nearer than one that does not, ×100 (chance is 50; \
±6 at most with 300 items, 95 %, and more with fewer), and the mean cosine with the one that does not. Both are made \
by rules."""


def write_figures(
    bundle: Bundle,
    scores: Mapping[str, Mapping[str, float]],
    beside: Mapping[str, Mapping[str, float]],
    machines: Mapping[str, str],
) -> None:
    """Add new scores, by precision, to a bundle and to its model card; see `with_figures`.

    Existing scores of other sets are kept, except speeds, which may be from another machine. Raises ClozeError, also
    if the bundle was replaced after it was loaded, because the scores belong to the bundle that was loaded.
    """
    path, spec = bundle.path, bundle.spec
    former = {
        precision: {name: score for name, score in row.items() if not name.startswith("cost ")}
        for precision, row in spec.provenance.scores.items()
    }
    merged = former | {precision: former.get(precision, {}) | dict(row) for precision, row in scores.items()}
    provenance = spec.provenance.model_copy(update={"scores": merged})
    sizes = {name: (path / GRAPHS[name]).stat().st_size for name in PRECISIONS if GRAPHS[name] in spec.files}
    with changing(bundle, provenance) as folder:
        file = folder / "README.md"
        card = with_figures(file.read_text(encoding="utf-8"), path.name, provenance, sizes, beside, machines)
        file.write_text(card, encoding="utf-8")


def with_figures(
    card: str,
    name: str,
    provenance: Provenance,
    sizes: Mapping[Precision, int],
    beside: Mapping[str, Mapping[str, float]] | None = None,
    machines: Mapping[str, str] | None = None,
) -> str:
    """The card with the provenance's scores in its metadata and its section `Figures`; everything else is unchanged.

    `beside` has the figures of other models, and `machines` names the machine of each model's speed. A card without
    this section gets one at its end. Raises ExportError if the metadata cannot be read.
    """
    try:
        changed = ModelCard(card)
    except (ValueError, YAMLError) as error:
        raise ExportError(
            f"the metadata of README.md cannot be read ({error}); correct the YAML between its lines `---`"
        ) from error
    data: Any = changed.data
    others = [result for result in data.eval_results or [] if not str(result.metric_name).endswith(OWN_ENDING)]
    data.eval_results = [*others, *_best_results(provenance, list(sizes))] or None  # a card cannot hold an empty list
    data.model_name = (data.model_name or name) if data.eval_results else None
    tables = _tables(provenance, sizes, beside or {}, machines or {})
    changed.text = with_section(changed.text, TITLE, tables)
    return str(changed)


def write_section(folder: Path, title: str, text: str) -> None:
    """Put a section into the card of the bundle in `folder`; see `with_section`."""
    card = folder / "README.md"
    card.write_text(with_section(card.read_text(encoding="utf-8"), title, text), encoding="utf-8")


def with_section(card: str, title: str, text: str) -> str:
    """The card with this section, which replaces a section of the same title. An empty text removes that section."""
    heading, card = f"## {title}\n", f"{card.rstrip()}\n"
    before, _, former = card.partition(f"\n{heading}")
    _, following, after = former.partition("\n## ")
    rest = f"\n{following}{after}".rstrip() if following else ""
    section = f"\n\n{heading}\n{text}" if text else ""
    return f"{before.rstrip()}{section}{rest}\n"


def _tables(
    provenance: Provenance,
    sizes: Mapping[Precision, int],
    beside: Mapping[str, Mapping[str, float]],
    machines: Mapping[str, str],
) -> str:
    if not provenance.scores:
        missing = " The int8 graph was not compared with fp32." if "int8" in sizes else ""
        return f"Not scored: the export was given no evaluation data.{missing}"
    rows: dict[str, Mapping[str, float]] = {
        precision if precision in sizes else f"{precision} (not in this bundle)": scores
        for precision, scores in provenance.scores.items()
    }
    rows |= beside
    every = list(dict.fromkeys(column for row in rows.values() for column in row))
    columns = [column for column in every if not column.endswith(" peak memory MB")]  # of the export, not the service
    search = search_columns(rows.values())
    papers = [column for column in (*STS_TASKS, "Avg.", *DEV_TASKS) if column in columns]
    own = [
        column
        for column in columns
        if _suite_of(column) not in (*SECTIONS, *NOT_SHOWN, "probes") and column not in search
    ]
    tables = {
        "Spearman ×100, 'all' aggregation, measured on the graphs themselves.": list(dict.fromkeys([*papers, *own])),
        "Search by cosine, ×100.": search,
    }
    timed = [name for name, row in {**provenance.scores, **beside}.items() if "cost" in map(_suite_of, row)]
    texts = SECTIONS | {"cost": f"{SECTIONS['cost']} {machine_note(timed, machines)}"}
    tables |= {text: [column for column in columns if _suite_of(column) == suite] for suite, text in texts.items()}
    shown = [f"{text}\n\n{_table(rows, names)}" for text, names in tables.items() if names]
    return "\n\n".join([*shown, *_probes(rows)])


def _probes(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The section of the suite `probes`, with a row per probe, if any model has figures of it."""
    scored = {name: row for name, row in rows.items() if any(_suite_of(column) == "probes" for column in row)}
    accuracies = dict.fromkeys(
        column for row in scored.values() for column in row if column.startswith("probes ") and column.endswith(RIGHT)
    )
    if not accuracies:
        return []
    cells = []
    for column in accuracies:
        name = column.removesuffix(RIGHT)
        figures = (f"{row[column]:.1f}, {row[f'{name} {FAR}']:.2f}" if column in row else "" for row in scored.values())
        cells.append([name.removeprefix("probes "), *figures])
    return [f"{PROBES}\n\n{markdown_table(['', *scored], cells)}"]


def _table(rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> str:
    """One row per model that has any of the figures. Missing figures are empty cells."""
    titles = [_set_of(column) if _suite_of(column) in SECTIONS else column for column in columns]
    cells = [
        [name, *(digits(row[column], _suite_of(column)) if column in row else "" for column in columns)]
        for name, row in rows.items()
        if any(column in row for column in columns)
    ]
    return markdown_table(["", *titles], cells)


def _suite_of(column: str) -> str:
    """`transfer MR accuracy` -> transfer. The columns of similarity and search do not name their suite."""
    return column.partition(" ")[0]


def _set_of(column: str) -> str:
    """`transfer MR accuracy` -> MR. In other suites the name of the measure is kept."""
    name = column.partition(" ")[2]
    return name.removesuffix(RIGHT) if _suite_of(column) in ("transfer", "transfer-fast") else name


def _best_results(provenance: Provenance, shipped: Sequence[Precision]) -> list[EvalResult]:
    """For the card's metadata, the figures of the most exact of the `shipped` graphs that has any."""
    every = (_of_precision(precision, provenance.scores.get(precision, {})) for precision in shipped)
    return next(filter(None, every), [])


def _of_precision(precision: Precision, scores: Mapping[str, float]) -> list[EvalResult]:
    results = []
    for column, value in scores.items():
        if column in (*STS_TASKS, *DEV_TASKS, "Avg."):
            dataset = "STS12 to STS16, STS-B and SICK-R" if column == "Avg." else column
            task, metric, title = "semantic-similarity", "spearman_cosine", "Spearman ×100 by cosine"
        elif column in search_columns([scores]):
            dataset, _, measure = column.rpartition(" ")
            metric = f"cosine_{measure.replace('@', '_at_').lower()}"
            task, title = "information-retrieval", f"{measure} ×100"
        elif _suite_of(column) in ("transfer", "transfer-fast"):
            dataset = _set_of(column)
            task, metric, title = "text-classification", "accuracy", "accuracy ×100"
        else:
            continue
        results.append(
            EvalResult(task, dataset, dataset, metric, value, metric_name=f"{title}, {precision}{OWN_ENDING}")
        )
    return results
