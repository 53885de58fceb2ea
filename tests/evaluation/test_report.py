"""The report: published rows, escaped texts, valid pages, and a browser that shows it in light and dark."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from suite_data import numbers, text

from cloze.training.evaluation.measures import Pairs
from cloze.training.evaluation.report.contents import Figure, Gap
from cloze.training.evaluation.report.plots import speed_plot, training_curves
from cloze.training.evaluation.report.tables import baseline_table, published
from cloze.training.evaluation.report.write import build_report, write_report
from cloze.training.evaluation.suites.maps import PairMapTask, WordMapTask, kinds_of
from cloze.training.evaluation.suites.neighbours import NeighbourTask
from cloze.training.evaluation.suites.space import SpaceTask
from cloze.training.evaluation.tables import figures, machine_note, machines
from cloze.training.evaluation.task import Score, Subject, measured
from cloze.training.model.encoder import SentenceEncoder

MODEL = 'int8 <b>"$x$"</b>'
COMMANDS = ("chromium", "chromium-browser", "google-chrome")
VOID = {"meta", "link", "br", "img"}


def some_scores() -> dict[str, list[Score]]:
    chance = np.random.default_rng(0)
    gold = [0.0, 1.0, 2.0, 3.0, 4.5, 5.0]
    left, right = ([text(*vector) for vector in chance.normal(size=(len(gold), 3))] for _ in range(2))
    found = [measured("sts", "<i>mine</i> | $y$", "spearman", "spearman", gold, gold, counts={"pairs": 6})]
    sets = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
    found += [measured("sts", name, "spearman", "spearman", gold, gold, counts={"pairs": 6}) for name in sets]
    found += SpaceTask("STS-B", Pairs(left, [*right[:-1], left[-1]], gold)).run(numbers())
    nearest = NeighbourTask("STS-B", Pairs(left, [*right[:-1], left[-1]], gold)).run(numbers())
    nearest[0].details["examples"][0]["query"] = "<b>"  # of two: a pair in both directions
    found += nearest
    found += PairMapTask("STS-B dev", list(zip(left[:3], right[:3], strict=True)), [(left[3], right[3])]).run(numbers())
    for layer in range(3):
        for pooling in ("mean", "cls", "max"):
            found.append(Score("baselines", "STS12", f"layer {layer} {pooling}", 40.0 + layer, {"pairs": 6}))
    found.append(Score("cost", "STS-B", "sentences/s", 123.0, {"sentences": 6}))
    return {MODEL: found, "other": found}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A report of a run whose names and texts contain markup."""
    (tmp_path / "log.jsonl").write_text(
        '{"step": 0, "eval_dev_spearman": 40}\n{"step": 10, "loss": 1.5}\n'
        '{"step": 20, "loss": 1, "eval_dev_spearman": 50}\n'
    )
    scores = some_scores()
    shorts = {name: figures(row) for name, row in scores.items()}
    write_report(tmp_path / "report", str(tmp_path), scores, shorts, {}, machines(scores))
    return tmp_path / "report"


class Checker(HTMLParser):
    """Notes what is not closed in order, ids that occur twice, and what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.faults: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href", "style") and "//" in str(value):
                self.faults.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}>")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()


def test_the_page_is_valid_and_loads_nothing(report: Path) -> None:
    page = (report / "report.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.faults == checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert not checker.tags & {"script", "b", "i", "link", "img", "iframe"}
    assert "http://" not in page
    assert "https://" not in page


def test_texts_are_escaped_in_every_form(report: Path) -> None:
    assert "int8 &lt;b&gt;&quot;$x$&quot;&lt;/b&gt;" in (report / "report.html").read_text(encoding="utf-8")
    markdown = (report / "report.md").read_text(encoding="utf-8")
    assert r"\<i\>mine\</i\> \| $y$" in markdown
    content = json.loads((report / "report.json").read_text(encoding="utf-8"))
    assert content["results"][0]["model"] == MODEL
    assert content["results"][0]["task"] == "<i>mine</i> | $y$"


def test_nearest_sentences_are_shown_with_the_one_that_people_chose(report: Path) -> None:
    page, markdown = ((report / f"report.{form}").read_text(encoding="utf-8") for form in ("html", "md"))
    assert f"<h3>Nearest sentences: {escape(MODEL)}</h3>" in page
    assert page.count("<article>") == 4  # of two models
    assert re.search(
        r"<article><h4>&lt;b&gt;</h4><ol><li>1\.00  [^<]*  ✓</li>(<li>\S+  [^<]*</li>){2}</ol></article>", page
    )
    assert re.search(r"\*\*\\<b\\>\*\*\n\n1\. \S+ .* ✓\n2\. .*\n3\. ", markdown)


def test_every_figure_has_a_name_and_the_colours_of_the_page() -> None:
    scores = some_scores()
    found = build_report("runs/none", scores, {name: figures(row) for name, row in scores.items()}, {}, {})
    drawn = [part for section in found.sections for part in section.parts if isinstance(part, Figure)]
    assert {figure.name.partition("-")[0] for figure in drawn} == {"cosines", "pairs", "layers", "speed"}
    for figure in drawn:
        root = ElementTree.fromstring(figure.svg)
        assert [child.tag for child in root[:2]] == ["title", "desc"]
        assert root.get("role") == "img"
        assert "var(--accent)" in figure.svg
        assert "#01fe" not in figure.svg
        assert next(root.iter("text"), None) is not None
    reasons = {gap.title: gap.reason for gap in found.gaps}
    assert set(reasons) == {"Map of word vectors", "Loss and evaluations"}
    assert "shows no word vectors" in reasons["Map of word vectors"]


def test_baselines_are_averaged_and_the_report_says_what_a_fit_gains() -> None:
    """BERT-flow: (40 + 44) / 2 against (41 + 49) / 2."""
    figures_of = {
        "last-two": (41.0, 49.0),
        "BERT-flow": (40.0, 44.0),
        "whitening": (60.0, 61.0),
        "first-last": (50, 50),
    }
    scores = [
        Score("baselines", task, name, float(values[place]), {})
        for place, task in enumerate(("STS12", "STS13"))
        for name, values in figures_of.items()
    ]
    table = baseline_table("parent", scores)
    assert table is not None
    assert table.columns == ["", "STS12", "STS13", "Avg."]
    assert table.groups[""][1].cells == ["BERT-flow", "40.00", "44.00", "42.00"]
    assert table.notes == [
        "whitening is 10.50 above first-last, the mean that it is fitted on.",
        "BERT-flow is 3.00 below last-two, the mean that it is fitted on.",
    ]
    assert baseline_table("other", [Score("sts", "STS12", "spearman", 1.0, {})]) is None


def test_figures_of_held_out_rows_are_drawn_where_no_development_data_was(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(
        '{"step": 0, "eval_held_out_loss": 1.25}\n{"step": 10, "loss": 1.5, "eval_held_out_loss": 1.125}\n'
    )
    figure = training_curves(tmp_path)
    assert isinstance(figure, Figure)
    assert figure.data == {"loss": [(10, 1.5)], "evaluations": {"loss": [(0, 1.25), (10, 1.125)]}}
    assert figure.table is not None
    assert [row.cells for row in figure.table.groups[""]] == [["0", "1.2500"], ["10", "1.1250"]]


def test_a_model_of_a_file_is_drawn_beside_the_scored_one() -> None:
    one, parent = {"Avg.": 80.0, "cost STS-B sentences/s": 900.0}, {"Avg.": 78.9, "cost STS-B sentences/s": 400.0}
    assert isinstance(speed_plot({"int8": one}), Gap)
    figure = speed_plot({"int8": one, "parent, torch fp32": parent})
    assert isinstance(figure, Figure)
    assert figure.data["parent, torch fp32"] == {"sentences/s": 400.0, "Avg.": 78.9}


def test_a_speed_is_shown_with_the_machine_that_measured_it() -> None:
    """Speeds of a file are of the machine that wrote it, not of the one that writes the report."""
    speed = "cost STS-B sentences/s"
    scores = {
        name: [Score("cost", "STS-B", "sentences/s", 900.0, {"sentences": 6}, details={"machine": "Ours, CPUs: 2"})]
        for name in ("int8", "fp32")
    }
    shorts = {name: figures(row) for name, row in scores.items()}
    assert "Machine: Ours, CPUs: 2. A server's" in cost_section(scores, shorts, {}, machines(scores))
    others = {name: {"Avg.": 78.9, speed: 400.0} for name in ("parent, torch fp32", "old, torch fp32")}
    of_file = {"parent, torch fp32": "Theirs, CPUs: 64"}
    expected = (
        "Machines: int8 and fp32 on Ours, CPUs: 2; parent, torch fp32 on Theirs, CPUs: 64; old, torch fp32 on a "
        "machine that was not recorded."
    )
    assert expected in cost_section(scores, shorts, others, machines(scores) | of_file)
    assert machine_note(["int8", "old"], machines(scores)).startswith("Machines: int8 on Ours, CPUs: 2; old on a mach")


def cost_section(*arguments: Any) -> str:
    (section,) = (section for section in build_report("runs/none", *arguments).sections if section.name == "cost")
    return section.says


def test_printed_averages_that_do_not_follow_are_known() -> None:
    differing = {
        row.name: (row.average, row.mean)
        for suite in ("sts", "transfer")
        for row in published(suite)
        if row.mean is not None and row.mean != row.average
    }
    assert differing["PromptBERT"] == (78.54, 78.52)
    assert differing["SBERT"] == (74.89, 74.86)
    assert differing["BERT-large flow"] == (70.07, 69.74)
    assert differing["Avg. BERT embedding"] == (84.94, 84.95)
    assert differing["SBERT-large SG-OPT"] == (79.76, 79.75)
    assert len(differing) == 5


def test_kinds_of_tokens() -> None:
    assert kinds_of(["[CLS]", "the", "##ing", "a", "12", "Paris"], "##") == {1: "lower", 2: "subword", 5: "upper"}
    assert kinds_of(["<s>", "Ġthe", "ing", "ĠParis", "Ġ", "##"], None) == {1: "lower", 2: "subword", 3: "upper"}


def test_word_vectors_are_mapped(tiny_bert: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    [score] = WordMapTask("word vectors", 10).run(
        Subject("tiny", encoder.embed, encoder.embed, "digest", model=encoder)
    )
    assert 0 < score.value < 100
    assert len(score.details["words"]) == 10
    assert WordMapTask("word vectors").run(numbers()) == []
    shown = build_report("x", {"tiny": [score]}, {"tiny": {}}, {}, {})
    [figure] = [part for section in shown.sections for part in section.parts if isinstance(part, Figure)]
    assert "This vocabulary has no upper case." in figure.says


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_report(report: Path, scheme: str) -> None:
    from playwright.sync_api import sync_playwright

    command = next(filter(None, map(shutil.which, COMMANDS)), None)
    if command is None:
        pytest.skip(f"No Chromium can be had here: none of {', '.join(COMMANDS)} is on the PATH")
    contrast = (Path(__file__).parents[1] / "playground" / "contrast.js").read_text(encoding="utf-8")
    complaints: list[str] = []
    requests: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=command, timeout=1000 * PATIENCE)
        page = browser.new_page(color_scheme=scheme, viewport={"width": 360, "height": 800})  # type: ignore[arg-type]
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto((report / "report.html").as_uri(), timeout=1000 * PATIENCE)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        weak = [each for each in page.evaluate(contrast) if each["ratio"] < each["least"]]
        assert page.locator("svg[role=img]").count() >= 7
        browser.close()
    assert complaints == weak == []
    assert requests == [(report / "report.html").as_uri()]
