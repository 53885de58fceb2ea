"""The report of an evaluation: report.html, report.json and report.md in one folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from cloze.encoding.files import write_whole
from cloze.training.evaluation.report.contents import Figure, Gap, Part, Report, Section
from cloze.training.evaluation.report.formats import markdown, page
from cloze.training.evaluation.report.plots import (
    SPEED,
    STYLE,
    cosine_histograms,
    layer_grid,
    pair_map,
    speed_plot,
    training_curves,
    word_map,
)
from cloze.training.evaluation.report.tables import baseline_table, beside_papers, neighbour_examples, plain_table
from cloze.training.evaluation.tables import digits, machine_note
from cloze.training.evaluation.task import Score

Scores = Mapping[str, Sequence[Score]]
Shorts = Mapping[str, Mapping[str, float]]


def write_report(
    folder: Path, path: str, scores: Scores, shorts: Shorts, beside: Shorts, machines: Mapping[str, str]
) -> None:
    """Write the three files. Files of an earlier report are overwritten.

    `shorts` has the `figures` of each model, `beside` those of other models, which are drawn for comparison. `machines`
    names the machine of each model's speed.
    """
    report = build_report(path, scores, shorts, beside, machines)
    figures = [part for section in report.sections for part in section.parts if isinstance(part, Figure)]
    content: dict[str, Any] = {
        "path": path,
        "scores": shorts,
        "figures": {figure.name: {"title": figure.title, "data": figure.data} for figure in figures},
        "left out": {gap.title: gap.reason for gap in report.gaps},
        "results": [{"model": name} | score.as_json() for name, row in scores.items() for score in row],
    }
    files = {"report.html": page(report), "report.md": markdown(report), "report.json": json.dumps(content) + "\n"}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_whole(folder / name, text)


@rc_context(STYLE)
def build_report(path: str, scores: Scores, shorts: Shorts, beside: Shorts, machines: Mapping[str, str]) -> Report:
    """The report with everything that these scores can show. For a run, it has the training curves too."""
    timed = [name for name, row in {**shorts, **beside}.items() if SPEED in row]
    drafts: list[tuple[str, str, str, list[Part | Gap | None]]] = [
        (
            "sts",
            "Semantic textual similarity",
            "Spearman ×100 of cosine and human score, over all pairs of a set ('all').",
            [beside_papers("sts", "Test sets", scores), plain_table("sts", "All figures of each set", scores)],
        ),
        (
            "search",
            "Search",
            "Exact search by cosine, ×100; higher is better.",
            [
                plain_table("retrieval", "Collections", scores),
                beside_papers("neighbours", "Neighbours in STS-B test, recall ×100", scores),
                *(neighbour_examples(name, row) for name, row in scores.items()),
            ],
        ),
        (
            "transfer",
            "Classification",
            "Accuracy ×100 of a classifier on the vectors.",
            [
                beside_papers("transfer", "SentEval's protocol", scores),
                plain_table("transfer-fast", "Fast protocol, which the papers' figures do not follow", scores),
            ],
        ),
        (
            "own",
            "Own data",
            "Figures on your own files, ×100.",
            [plain_table(suite, suite.capitalize(), scores) for suite in ("pairs", "triplets", "labels")],
        ),
        (
            "probes",
            "What it does not understand",
            "Accuracy ×100: how often the text with the same meaning is nearer than the other text. The second figure "
            "is the mean cosine with the other text.",
            [plain_table("probes", "Probes", scores)],
        ),
        (
            "space",
            "The vectors in space",
            "Alignment is the distance of sentences that mean the same, uniformity how evenly all sentences spread: "
            "lower is better for both. Anisotropy is the mean cosine of any two sentences.",
            [
                beside_papers("space", "Alignment and uniformity on STS-B test", scores),
                plain_table("space", "All figures", scores),
                *(draw(name, row) for draw in (cosine_histograms, pair_map, word_map) for name, row in scores.items()),
            ],
        ),
        (
            "layers",
            "Without training",
            "What the layers of the encoder give as they are.",
            [draw(name, row) for name, row in scores.items() for draw in (baseline_table, layer_grid)],
        ),
        (
            "cost",
            "Cost",
            f"{machine_note(timed, machines)} A server's speed is what its client sees. The memory is the peak of the "
            "process.",
            [plain_table("cost", "Speed, size and memory", scores), speed_plot({**shorts, **beside})],
        ),
        ("training", "Training", "How the run went.", [training_curves(Path(path))]),
    ]
    sections, gaps = [], []
    for name, title, says, parts in drafts:
        gaps += [part for part in parts if isinstance(part, Gap)]
        if kept := [part for part in parts if part is not None and not isinstance(part, Gap)]:
            sections.append(Section(name, title, says, kept))
    return Report(f"Evaluation of {path}", _facts(scores, shorts), sections, gaps, _source(path))


def _facts(scores: Scores, shorts: Shorts) -> list[tuple[str, str, str]]:
    facts = []
    for name, row in scores.items():
        if "Avg." in shorts[name]:
            facts.append((f"STS average, {name}", digits(shorts[name]["Avg."]), "Spearman ×100, seven test sets"))
        searched = [score.value for score in row if score.metric == "nDCG@10"]
        if searched:
            mean = digits(sum(searched) / len(searched), "retrieval")
            facts.append((f"Search, {name}", mean, f"nDCG@10 ×100, mean of {len(searched)} collections"))
        cost = {score.metric: score.value for score in row if score.suite == "cost"}
        for metric, label in (("sentences/s", "sentences per second"), ("size MB", "MB")):
            if metric in cost:
                facts.append(
                    (f"{'Speed' if metric != 'size MB' else 'Size'}, {name}", digits(cost[metric], "cost"), label)
                )
    return facts


def _source(path: str) -> str:
    return f"Written by cloze evaluate {path}"
