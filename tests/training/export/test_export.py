"""The commands, on a tiny run: what export writes and refuses, and what evaluate makes of a path."""

import json
import re
import shutil
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import EvalResult, ModelCard
from onnx import ModelProto
from tiny_bundle import write_bundle
from tiny_graphs import export_graphs_of, traced

from cloze.command import run as run_command
from cloze.encoding.bundle import Bundle, changing
from cloze.encoding.errors import BundleError
from cloze.training import evaluate
from cloze.training.encoder_source import encoder_folder, kind_of
from cloze.training.errors import ExportError, RunError
from cloze.training.evaluation.card import with_figures
from cloze.training.evaluation.measures import Pairs
from cloze.training.evaluation.options import ModelOptions
from cloze.training.evaluation.search import Collection
from cloze.training.evaluation.sts import DEV_TASKS, STS_TASKS
from cloze.training.evaluation.subjects import subjects
from cloze.training.evaluation.suites.cost import CostTask
from cloze.training.evaluation.suites.retrieval import RetrievalTask
from cloze.training.evaluation.suites.space import SpaceTask
from cloze.training.evaluation.suites.sts import StsTask
from cloze.training.evaluation.task import Score, Subject, Task, score_tasks
from cloze.training.export import __main__ as export
from cloze.training.export import bundle as exporting
from cloze.training.export.card import model_card, parent_metadata, provenance_of
from cloze.training.export.layers import Form
from cloze.training.export.parity import Difference
from cloze.training.model.continuous_template import ContinuousTemplate
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.graph_encoder import GraphEncoder
from cloze.training.model.heads import ProjectionHead

TEMPLATE = 'This sentence of "[X]" means [MASK].'
DIGEST = "0" * 64
SENTENCES = ["Two dogs run over the green field.", "A man", "rain in the city", "she wrote", "old friend", "a stage."]


@pytest.fixture
def run(tmp_path: Path, tiny_bert: Path) -> Path:
    folder, parent = tmp_path / "run", tmp_path / "parents" / "tiny"
    parent.mkdir(parents=True)
    (parent / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# tiny\n", encoding="utf-8")
    SentenceEncoder.load(str(tiny_bert), template=TEMPLATE, pooling="mask").save(folder / "model")
    (folder / "recipe.toml").write_text('method = "distill"\n')
    content = {
        "parent": "tiny",
        "recipe": {"method": "distill", "encoder": str(parent), "corpus": ["/home/me/rain.txt"], "batch_size": 8},
        "data": [{"name": "rain.txt", "sentences": 1234, "sha256": DIGEST}],
        "commit": None,
        "seeds": [42],
        "versions": {"torch": "2"},
    }
    (folder / "run.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch, tiny_bert: Path) -> None:
    """Tracing takes seconds, and every run here holds the same weights."""

    def remembered(encoder: SentenceEncoder, form: Form) -> ModelProto:
        return traced(encoder, tiny_bert, form)

    monkeypatch.setattr(exporting, "trace", remembered)


@pytest.fixture
def few_pairs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Task]:
    pairs = Pairs(["two dogs run", "rain", "a man"], ["two dogs", "the city", "a man"], [4.0, 1.0, 5.0])
    weather = Collection("weather", ["rain over the city", "two dogs", "a letter"], ["rain", "dogs"], [{0: 1}, {1: 2}])
    tasks: list[Task] = [StsTask(name, {name: pairs}) for name in (*STS_TASKS, *DEV_TASKS)]
    tasks.append(RetrievalTask("weather", weather))
    monkeypatch.setattr("cloze.training.evaluation.evaluate.load_suites", lambda *_: tasks)
    monkeypatch.setattr(exporting, "load_suites", lambda *_: tasks)
    monkeypatch.chdir(tmp_path)  # the cache is a folder below it
    return tasks


def test_weights_of_7_bits_are_reported_also_of_a_bundle_that_is_replaced(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a copy stands for the new bundle."""
    bundles = {precision: tmp_path / precision for precision in ("fp32", "int8")}
    for precision, out in bundles.items():
        export.main([str(run), str(out), "--precision", precision])
    capsys.readouterr()
    for precision, other in (("fp32", "int8"), ("int8", "fp32")):
        out, new = tmp_path / f"of-{precision}", bundles[other]
        shutil.copytree(bundles[precision], out)
        replace = partial(shutil.copytree, new, dirs_exist_ok=True)
        monkeypatch.setattr(exporting, "write_bundle", lambda out, *_, replace=replace, **__: replace(out))
        export.main([str(out), str(out), "--precision", other])
        assert ("come from the int8 graph" in capsys.readouterr().err) == (precision == "int8")


def nothing_left(out: Path) -> bool:
    return not out.exists() and not list(out.parent.glob(f".{out.name}*"))


def test_a_run_becomes_a_bundle(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export.main([str(run), str(out), "--precision", "int8,fp32,fp16", "--max-tokens", "40"]) is None
    bundle = Bundle.load(out)
    spec = bundle.spec
    assert bundle.precisions == ("fp32", "fp16", "int8")
    assert (spec.template, spec.pooling, spec.max_tokens, spec.dimension) == (TEMPLATE, "mask", 40, 32)
    assert spec.provenance.parity["fp32"] < 1e-5 < spec.provenance.parity["int8"]
    assert set(spec.provenance.graphs) == {"fp32", "fp16", "int8"}
    assert spec.provenance.recipe["corpus"] == ["rain.txt"]
    assert spec.provenance.recipe["encoder"] == "tiny"
    encoder = SentenceEncoder.load(str(run / "model"), max_tokens=40)
    texts = ["", "two dogs", "[MASK]", "rain " * 100]
    np.testing.assert_allclose(GraphEncoder.of(bundle, "fp32").embed(texts), encoder.embed(texts), atol=1e-5)


def test_the_card_tells_what_is_known(run: Path, tmp_path: Path) -> None:
    notes, out = tmp_path / "notes.md", tmp_path / "out"
    notes.write_text("## Text\n\nRain, by hand.\n", encoding="utf-8")
    export.main([str(run), str(out), "--precision", "int8", "--notes", str(notes)])
    card = (out / "README.md").read_text(encoding="utf-8")
    for words in (
        "license: mit\n",
        "pipeline_tag: sentence-similarity",
        f"    {TEMPLATE}\n",
        "| rain.txt | 1,234 |",
        "batch_size = 8",
        "Not scored",
        "was not compared with fp32",
        "--precision int8 --max-tokens 64",
        "Rain, by hand.",
    ):
        assert words in card
    assert "/home/me" not in card
    assert Bundle.load(out).precisions == ("int8",)


def test_figures_of_fp32_are_told_beside_int8(run: Path, tmp_path: Path, few_pairs: list[Task]) -> None:
    out = tmp_path / "out"
    export.main([str(run), str(out), "--precision", "int8", "--data", "anywhere"])
    scores = Bundle.load(out).spec.provenance.scores
    assert set(scores) == {"fp32", "int8"}
    assert set(scores["int8"]) == {*STS_TASKS, *DEV_TASKS, "Avg.", "weather nDCG@10"}
    card = (out / "README.md").read_text(encoding="utf-8")
    assert card.count("fp32 (not in this bundle)") == 2
    figure = scores["fp32"]["weather nDCG@10"]
    assert f"| | weather nDCG@10 |\n| --- | ---: |\n| fp32 (not in this bundle) | {figure:.2f} |" in card


def test_the_hub_reads_the_card(run: Path, tmp_path: Path, few_pairs: list[Task]) -> None:
    out = tmp_path / "out"
    export.main([str(run), str(out), "--precision", "fp32,int8", "--data", "anywhere"])
    data = ModelCard.load(out / "README.md").data
    assert (data.license, data.language, data.library_name) == ("mit", "en", "cloze")
    assert {"sentence-similarity", "onnx", "cloze"} <= set(data.tags)
    scores = Bundle.load(out).spec.provenance.scores["fp32"]
    assert data.model_name == "out"
    assert {result.dataset_name: result.metric_value for result in data.eval_results} == {
        {"Avg.": "STS12 to STS16, STS-B and SICK-R", "weather nDCG@10": "weather"}.get(name, name): value
        for name, value in scores.items()
    }
    [search] = [result for result in data.eval_results if result.dataset_name == "weather"]
    assert (search.task_type, search.metric_type) == ("information-retrieval", "cosine_ndcg_at_10")
    assert search.metric_name == "nDCG@10 ×100, fp32 graph"


def test_a_card_names_a_base_model_of_the_hub_and_no_figures_that_nobody_measured(run: Path) -> None:
    provenance, _ = provenance_of(run)
    config = SentenceEncoder.load(str(run / "model")).config
    provenance = provenance.model_copy(update={"parent": "owner/parent"})
    data = ModelCard(model_card("out", config, provenance, {}, library="sentence-transformers")).data
    assert data.to_dict() == {
        "base_model": "owner/parent",
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-similarity", "feature-extraction", "onnx", "cloze"],
    }
    scores = {"int8": {"transfer MR accuracy": 81.5, "cost sentences/s": 9.0}, "fp32": {"transfer MR accuracy": 81.6}}
    provenance = provenance.model_copy(update={"scores": scores, "parity": {"int8": 0.0}})
    card = model_card("out", config, provenance, {"int8": 1})
    [found] = ModelCard(with_figures(card, "out", provenance, {"int8": 1})).data.eval_results
    assert (found.task_type, found.dataset_name, found.metric_value) == ("text-classification", "MR", 81.5)
    assert found.metric_name == "accuracy ×100, int8 graph"
    own = EvalResult("text-classification", "mine", "mine", "accuracy", 9.0, metric_name="accuracy")
    changed = ModelCard(card)
    changed.data.model_name, changed.data.eval_results = "out", [own]
    provenance = provenance.model_copy(update={"scores": {"fp32": {"pairs a|b spearman": 50.0}} | scores})
    card = with_figures(str(changed), "out", provenance, {"fp32": 1, "int8": 1})
    results = ModelCard(card).data.eval_results
    assert [(result.dataset_name, result.metric_value) for result in results] == [("mine", 9.0), ("MR", 81.6)]


def test_evaluate_writes_more_suites_and_other_models_to_the_card(
    run: Path, tmp_path: Path, tiny_bert: Path, few_pairs: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, beside = tmp_path / "out", tmp_path / "parent.json"
    pairs = Pairs(["two dogs run", "rain", "a man"], ["two dogs", "the city", "a man"], [4.5, 1.0, 5.0])
    more = {"": few_pairs, "space": [SpaceTask("STS-B", pairs)], "cost": [CostTask("STS-B", pairs.left, "a machine")]}

    def load(data: Path, names: Sequence[str] = ("",), *_: object) -> list[Task]:
        return [task for name in names or [""] for task in more[name]]

    monkeypatch.setattr("cloze.training.evaluation.evaluate.load_suites", load)
    scored = ["--data", "anywhere", "--cache", str(tmp_path / "scores"), "--suite"]
    parent = [str(tiny_bert), "--template", "[X]", "--pooling", "mean", *scored, "", "space", "cost"]
    evaluate.main([*parent, "--json", str(beside)])
    beside.write_text(beside.read_text().replace("a machine", "a machine elsewhere"))
    notes = ["--notes", str(_notes(tmp_path))]
    export.main([str(run), str(out), "--precision", "fp32,int8", "--data", "anywhere", *notes])
    exported = ModelCard.load(out / "README.md")
    served = Bundle.load(out)

    evaluate.main([str(out), *scored, "space", "cost", "--card", "--beside", str(beside)])
    bundle = Bundle.load(out)
    card = ModelCard.load(out / "README.md")
    others = json.loads(beside.read_text())["scores"]["torch fp32"]
    own = bundle.spec.provenance.scores["fp32"]
    assert own["STS12"] == served.spec.provenance.scores["fp32"]["STS12"]
    assert bundle.spec.space == served.spec.space
    assert f"| {tiny_bert.name}, torch fp32 | {others['STS12']:.2f} | " in card.text
    columns = ("alignment", "uniformity", "anisotropy", "anisotropy of word vectors")
    assert f"| | {' | '.join(f'STS-B {column}' for column in columns)} |" in card.text
    cells = [f"{own['space STS-B ' + column]:.3f}" for column in columns[:3]]
    assert f"| fp32 | {' | '.join(cells)} |  |" in card.text  # a graph shows no word vectors
    assert f"| fp32 | {own['cost STS-B sentences/s']:,.1f} | " in card.text
    machines = f"fp32 and int8 on a machine; {tiny_bert.name}, torch fp32 on a machine elsewhere"
    assert f"\n\nSentences of STS-B test per second. Machines: {machines}.\n\n| |" in card.text
    kept, before = (re.sub(r"(?s)## Figures.*?(?=\n## )", "", each.text) for each in (card, exported))
    assert kept == before
    assert "\n## Of our own\n\nNever changed.\n\n## Files\n" in card.text
    for result in card.data.eval_results:
        names = {"STS12 to STS16, STS-B and SICK-R": "Avg.", "weather": "weather nDCG@10"}
        assert result.metric_value == own[names.get(result.dataset_name, result.dataset_name)]

    (link := tmp_path / "link").symlink_to(out)
    evaluate.main([str(link), *scored, "space", "--card"])
    assert link.is_symlink()
    scores = Bundle.load(out).spec.provenance.scores
    assert {precision: [name for name in row if "cost" in name] for precision, row in scores.items()} == {
        "fp32": [],
        "int8": [],
    }
    assert tiny_bert.name not in (out / "README.md").read_text(encoding="utf-8").partition("## Figures")[2]


def _notes(folder: Path) -> Path:
    (folder / "notes.md").write_text("## Of our own\n\nNever changed.\n", encoding="utf-8")
    return folder / "notes.md"


def test_a_card_that_cannot_be_written_is_refused_before_the_work(run: Path, tmp_path: Path) -> None:
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    export.main([str(run), str(out)])
    for path, words, message in (
        (run, ["--card"], r"run is not a bundle, so it has no model card to write to; leave out --card"),
        ("http://127.0.0.1:9", ["--card"], r"^http://127.0.0.1:9 is not a bundle, so it has no model card"),
        (
            out,
            ["--beside", str(figures)],
            r"--beside is used only in the model card and the report; give --card or --report too",
        ),
        (out, ["--card", "--beside", str(figures)], r"figures\.json cannot be read as figures of evaluate --json"),
    ):
        with pytest.raises(RunError, match=message):
            evaluate.main([str(path), "--data", "anywhere", *words])
    figures.write_text("{}")
    with pytest.raises(RunError, match=r"figures\.json cannot be read as figures of evaluate --json"):
        evaluate.main([str(out), "--data", "anywhere", "--card", "--beside", str(figures)])
    figures.write_text(json.dumps({"path": "runs/mine", "scores": {"torch fp32": {"STS12": 50.0}}}))
    with pytest.raises(RunError, match=r"figures\.json has mine, torch fp32, which another file of --beside has too"):
        evaluate.main([str(out), "--data", "anywhere", "--card", "--beside", str(figures), str(figures)])


def test_scores_are_not_written_to_a_bundle_that_took_the_place_of_the_scored_one(
    run: Path, tmp_path: Path, few_pairs: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    export.main([str(run), str(out := tmp_path / "out")])
    card = (out / "README.md").read_bytes()

    def load(*_: object) -> list[Task]:
        with changing(Bundle.load(out)):
            return few_pairs

    monkeypatch.setattr("cloze.training.evaluation.evaluate.load_suites", load)
    with pytest.raises(BundleError, match=r"out was replaced after it was read; run the command again"):
        evaluate.main([str(out), "--data", "anywhere", "--cache", str(tmp_path / "scores"), "--card"])
    assert (out / "README.md").read_bytes() == card


def test_a_card_without_figures_gets_some_and_one_with_bad_metadata_is_refused(run: Path) -> None:
    provenance, _ = provenance_of(run)
    provenance = provenance.model_copy(update={"scores": {"fp32": {"STS12": 50.0}}})
    card = with_figures("---\nlicense: mit\n---\n\n# Ours\n", "ours", provenance, {"fp32": 1})
    assert "\n\n# Ours\n\n## Figures\n\nSpearman" in card
    assert card.endswith("\n| fp32 | 50.00 |\n")
    assert ModelCard(card).data.license == "mit"
    own = {
        "triplets mine accuracy": 75.0,
        "labels topics V-measure": 40.0,
        "transfer MR accuracy": 80.0,
        "mine-sts": 1.0,
    }
    provenance = provenance.model_copy(update={"scores": {"fp32": own}})
    card = with_figures(card, "ours", provenance, {"fp32": 1})
    for title, value in (("mine-sts", 1), ("mine accuracy", 75), ("topics V-measure", 40), ("MR", 80)):
        assert f"\n\n| | {title} |\n| --- | ---: |\n| fp32 | {value}.00 |" in card
    assert "STS12" not in card
    provenance = provenance.model_copy(update={"scores": {"fp32": {"mine-sts": 1.0}}})
    for _ in range(2):  # the hub has no name for figures of one's own data
        card = with_figures(card, "ours", provenance, {"fp32": 1})
        assert ModelCard(card).data.eval_results is None
    with pytest.raises(ExportError, match=r"(?s)metadata of README\.md cannot be read .*correct the YAML"):
        with_figures("---\nlicense: [mit\n---\n", "ours", provenance, {"fp32": 1})


def test_denoising_is_in_the_graph(run: Path, tmp_path: Path) -> None:
    export.main([str(run), str(tmp_path / "out"), "--precision", "fp32", "--denoise"])
    bundle = Bundle.load(tmp_path / "out")
    assert bundle.spec.denoising
    np.testing.assert_allclose(GraphEncoder.of(bundle, "fp32").embed([""]), np.zeros((1, 32)), atol=1e-5)


def test_search_is_scored_with_the_templates_of_the_model(
    run: Path, tmp_path: Path, few_pairs: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `evaluate` scores the bundle."""
    templates = {"query": 'ask "[X]" of [MASK].', "document": 'tell "[X]" of [MASK].'}
    SentenceEncoder.load(str(run / "model"), templates=templates).save(run / "model")
    scored: list[Subject] = []

    def seen(subject: Subject, tasks: Sequence[Task], *rest: Any) -> list[Score]:
        scored.append(subject)
        return score_tasks(subject, tasks, *rest)

    monkeypatch.setattr(exporting, "score_tasks", seen)
    export.main([str(run), str(tmp_path / "out"), "--data", "anywhere"])
    (subject,) = subjects(str(tmp_path / "out"), ModelOptions())
    (at_export,) = scored
    for embed in ("embed", "embed_queries", "embed_documents"):
        np.testing.assert_array_equal(getattr(at_export, embed)(SENTENCES), getattr(subject, embed)(SENTENCES))
    assert np.abs(at_export.embed_queries(SENTENCES) - at_export.embed(SENTENCES)).max() > 0.01


def test_denoising_that_was_trained_is_served_unless_refused(run: Path, tmp_path: Path) -> None:
    SentenceEncoder.load(str(run / "model"), denoising=True).save(run / "model")
    for words, denoising in (([], True), (["--no-denoise"], False), (["--denoise"], True)):
        export.main([str(run), str(tmp_path / "out"), *words])
        assert Bundle.load(tmp_path / "out").spec.denoising == denoising


def test_the_final_period_is_given_where_it_is_asked_for(run: Path, tmp_path: Path) -> None:
    for words, period in ((["--final-period"], True), ([], False)):
        export.main([str(run), str(tmp_path / "out"), *words])
        assert Bundle.load(tmp_path / "out").spec.final_period == period
        assert (" --final-period" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")) == period


@pytest.mark.parametrize("part", ["head", "template"])
def test_the_card_names_a_kept_head_and_a_continuous_template(
    part: str, run: Path, tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_graphs_of(tiny_bert, monkeypatch)  # they lack this part, and so would differ
    encoder = SentenceEncoder.load(str(run / "model"))
    if part == "head":
        encoder.head = ProjectionHead("tanh", encoder.backbone.config)
    else:
        encoder.continuous = ContinuousTemplate(encoder.text_encoder, encoder.word_embeddings)
    encoder.save(run / "model")
    export.main([str(run), str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ("A tanh head comes last." in card) == (part == "head")
    assert ("Trained vectors replace the embeddings of the template's words." in card) == (part == "template")


def test_fp32_too_far_from_torch_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "difference", lambda *_: Difference(2e-4, 1.0, 1.0))
    with pytest.raises(ExportError, match=r"differs from torch by 2\.0e-04.*the limit is 1e-04"):
        export.main([str(run), str(tmp_path / "out"), "--precision", "fp32"])
    assert nothing_left(tmp_path / "out")


def test_a_difference_that_is_no_number_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "difference", lambda *_: Difference(float("nan"), 1.0, 1.0))
    with pytest.raises(ExportError, match="nan"):
        export.main([str(run), str(tmp_path / "out"), "--precision", "fp32"])


def test_fp16_that_overflows_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([Difference(1e-6, 1.0, 1.0), Difference(float("nan"), float("nan"), float("nan"))])
    monkeypatch.setattr(exporting, "difference", lambda *_: next(found))
    with pytest.raises(ExportError, match=r"the fp16 graph gives numbers that are not finite; .* Leave fp16 out"):
        export.main([str(run), str(tmp_path / "out"), "--precision", "fp16"])
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize(("precision", "cosine"), [("fp16", 0.9989), ("int8", 0.969), ("int8", float("nan"))])
def test_a_graph_far_from_the_model_is_refused_without_any_data(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, cosine: float
) -> None:
    found = cycle([Difference(1e-6, 1.0, 1.0), Difference(0.1, cosine, cosine)])
    monkeypatch.setattr(exporting, "difference", lambda *_: next(found))
    words = [str(run), str(tmp_path / "out"), "--precision", precision]
    with pytest.raises(
        ExportError, match=rf"the {precision} graph has a mean cosine of .*; at least .* is required, .* --force"
    ):
        export.main(words)
    assert nothing_left(tmp_path / "out")
    export.main([*words, "--force"])
    assert Bundle.load(tmp_path / "out").precisions == (precision,)


@pytest.mark.parametrize(
    ("name", "after", "refused"),
    [
        ("STS-B dev", 79.7, False),
        ("STS-B dev", 79.69, True),
        ("STS-B dev", float("nan"), True),
        ("weather nDCG@10", 79.49, True),
        ("STS12", 70.0, False),
    ],
)
def test_int8_that_costs_too_much_is_refused(
    run: Path,
    tmp_path: Path,
    few_pairs: list[Task],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    after: float,
    refused: bool,
) -> None:
    def scores(precision: str, *_: object) -> dict[str, float]:
        figures = dict.fromkeys((*STS_TASKS, *DEV_TASKS, "Avg.", "weather nDCG@10"), 80.0)
        return figures if precision == "fp32" else figures | {name: after}

    monkeypatch.setattr(exporting, "_scores", scores)
    if refused:
        with pytest.raises(ExportError, match=rf"int8 costs .* points on {name} .*; the limit is 0\.[35]"):
            export.main([str(run), str(tmp_path / "out"), "--precision", "int8", "--data", "anywhere"])
        assert nothing_left(tmp_path / "out")
        export.main([str(run), str(tmp_path / "out"), "--precision", "int8", "--data", "anywhere", "--force"])
        assert Bundle.load(tmp_path / "out")
    else:
        export.main([str(run), str(tmp_path / "out"), "--precision", "int8", "--data", "anywhere"])
        assert Bundle.load(tmp_path / "out")


def test_a_graph_that_cannot_be_fused_stays_plain(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(model: ModelProto, encoder: SentenceEncoder) -> ModelProto:
        raise ExportError("fusion is incomplete")

    monkeypatch.setattr(exporting, "fuse", refuse)
    export.main([str(run), str(tmp_path / "out"), "--precision", "fp32,fp16"])
    assert Bundle.load(tmp_path / "out").spec.provenance.graphs == {"fp32": "rows", "fp16": "plain"}
    assert "not fused" in capsys.readouterr().err


def test_int8_is_fitted_to_texts_of_a_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(["", *SENTENCES, *SENTENCES]) + "\n", encoding="utf-8")
    words = [str(run), "--precision", "int8"]
    export.main([*words[:1], str(tmp_path / "random"), *words[1:]])
    export.main([*words[:1], str(tmp_path / "fitted"), *words[1:], "--calibrate", str(tmp_path / "texts.txt")])
    random, fitted = (Bundle.load(tmp_path / name) for name in ("random", "fitted"))
    digest = sha256((tmp_path / "texts.txt").read_bytes()).hexdigest()[:16]
    made = f"activations in 8 bits, fitted to 12 texts of texts.txt, sha256 {digest}"
    assert fitted.spec.provenance.graphs["int8"].endswith(made)
    assert " --calibrate TEXTS " in (tmp_path / "fitted" / "README.md").read_text()
    assert random.spec.provenance.graphs["int8"].endswith("activations in 8 bits")
    assert fitted.spec.files["onnx/model_int8.onnx"] != random.spec.files["onnx/model_int8.onnx"]
    assert fitted.spec.weights == random.spec.weights
    expected = SentenceEncoder.load(encoder_folder(str(run))).embed(SENTENCES)
    found = GraphEncoder.of(fitted, "int8").embed(SENTENCES)
    lengths = np.linalg.norm(expected, axis=1) * np.linalg.norm(found, axis=1)
    assert ((found * expected).sum(1) / lengths).min() > 0.99


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (["--precision", "int8"], "one\ntwo\n", "has 2 texts; --calibrate needs at least 8"),
        (["--precision", "int8"], None, "is not a file; give --calibrate a text file with one text per line"),
        (["--precision", "fp32,fp16"], "one\n" * 9, "--calibrate fits the int8 graph; add int8 to --precision"),
    ],
)
def test_texts_that_int8_cannot_be_fitted_to_are_refused(
    words: list[str], text: str | None, message: str, run: Path, tmp_path: Path
) -> None:
    if text:
        (tmp_path / "texts.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ExportError, match=message):
        export.main([str(run), str(tmp_path / "out"), *words, "--calibrate", str(tmp_path / "texts.txt")])
    assert nothing_left(tmp_path / "out")


def test_int8_is_not_fitted_to_the_rows_of_a_table(run: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text\n" + "one\n" * 9, encoding="utf-8")
    words = ["--precision", "int8", "--calibrate", str(tmp_path / "texts.csv")]
    with pytest.raises(ExportError, match=r"\.csv is a table; give --calibrate a text file with one text per line"):
        export.main([str(run), str(tmp_path / "out"), *words])


def test_a_run_without_provenance_is_refused(run: Path, tmp_path: Path) -> None:
    whole = json.loads((run / "run.json").read_text())
    for content in (
        {key: value for key, value in whole.items() if key != "parent"},
        whole | {"data": [{"name": "x"}]},
    ):
        (run / "run.json").write_text(json.dumps(content))
        with pytest.raises(RunError, match=r"run\.json does not say (where the model comes from|how .* was trained)"):
            export.main([str(run), str(tmp_path / "out"), "--precision", "fp32"])


def test_errors_are_one_line_and_exit_codes_tell(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert run_command(lambda: export.main([str(run / "model"), out])) == 2
    assert run_command(lambda: export.main([str(run), out, "--max-tokens", "999"])) == 2
    assert run_command(lambda: export.main([str(run), out, "--data", str(tmp_path)])) == 2
    assert run_command(lambda: export.main([str(run), out, "--notes", "nowhere.md"])) == 2
    assert run_command(lambda: export.main([str(run), str(tmp_path / "parents")])) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in lines] == [True] * 5
    assert run_command(lambda: export.main([str(run), out, "--precision", "int4"])) == 2
    assert "--precision is 'int4': 'int4' is not one of fp32, fp16, int8" in capsys.readouterr().err
    assert nothing_left(Path(out))


def test_what_a_path_is(run: Path, tmp_path: Path, tiny_bert: Path) -> None:
    assert kind_of(str(run)) == "run"
    assert kind_of(str(run / "model")) == kind_of(str(tiny_bert)) == kind_of("owner/name") == "encoder"
    (run / "run.json").unlink()
    with pytest.raises(RunError, match=r"not finished; continue it.*--resume"):
        kind_of(str(run))
    with pytest.raises(RunError, match="is not a run"):
        kind_of(str(tmp_path))
    for path in (tmp_path / "nowhere", run / "recipe.toml", "./nowhere", "a/b/c"):
        with pytest.raises(RunError, match="is not a folder"):
            kind_of(str(path))


def test_a_copy_from_the_hub_may_have_graphs_beside_its_weights(tmp_path: Path, tiny_bert: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "copy")
    (tmp_path / "copy" / "onnx").mkdir()
    assert kind_of(str(tmp_path / "copy")) == "encoder"


def test_a_licence_of_its_own_is_not_the_parents(run: Path, tmp_path: Path) -> None:
    export.main([str(run), str(tmp_path / "own"), "--license", "apache-2.0"])
    assert "apache-2.0, made from tiny. The training" in (tmp_path / "own" / "README.md").read_text()
    export.main([str(run), str(tmp_path / "same")])
    assert "mit, as its parent tiny. The training" in (tmp_path / "same" / "README.md").read_text()


def test_a_long_text_with_a_slash_is_no_path(run: Path) -> None:
    content = json.loads((run / "run.json").read_text())
    content["recipe"]["template"] = f"and/or {'word ' * 80}[X]"
    (run / "run.json").write_text(json.dumps(content))
    assert provenance_of(run)[0].recipe["template"] == content["recipe"]["template"]


@pytest.mark.parametrize(("folder", "out"), [("mine", "."), ("mine/onnx", "..")])
def test_the_working_directory_is_not_replaced(
    folder: str, out: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / folder)
    with pytest.raises(BundleError, match=r"mine is the working directory or holds it, and would be replaced"):
        export.main([str(run), out])


def test_a_link_to_a_bundle_stays_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("first")
    export.main([str(run), str(tmp_path / "current"), "--precision", "fp32"])
    assert (tmp_path / "current").is_symlink()
    assert Bundle.load(tmp_path / "first").precisions == ("fp32",)


def test_an_unfinished_bundle_is_no_encoder(run: Path, tmp_path: Path) -> None:
    export.main([str(run), str(tmp_path / "out"), "--precision", "fp32"])
    assert kind_of(str(tmp_path / "out")) == "bundle"
    (tmp_path / "out" / "embedding.json").unlink()
    with pytest.raises(RunError, match="is not a run"):
        kind_of(str(tmp_path / "out"))


def test_evaluate_scores_runs_bundles_and_encoders(
    run: Path, tmp_path: Path, tiny_bert: Path, few_pairs: list[Task], capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, figures = tmp_path / "out", tmp_path / "figures.json"
    export.main([str(run), str(bundle), "--precision", "fp32,int8"])

    def scores(path: Path, *words: str) -> dict[str, dict[str, float]]:
        evaluate.main([str(path), "--data", "anywhere", "--json", str(figures), *words])
        found: dict[str, dict[str, float]] = json.loads(figures.read_text())["scores"]
        return found

    of_run = scores(run)
    assert of_run == scores(tiny_bert, "--template", TEMPLATE, "--pooling", "mask")
    assert list(of_run) == ["torch fp32"]
    assert list(of_run["torch fp32"]) == [*STS_TASKS, *DEV_TASKS, "weather nDCG@10", "Avg."]
    of_bundle = scores(bundle)
    assert list(of_bundle) == ["fp32", "int8"]
    assert of_bundle["fp32"] == of_run["torch fp32"]
    assert list(scores(bundle, "--precision", "int8")) == ["int8"]
    table = capsys.readouterr().out
    assert all(column in table for column in (*STS_TASKS, "Avg.", *DEV_TASKS, "Search", "weather"))


def test_evaluate_refuses_what_makes_no_sense(
    run: Path, tmp_path: Path, tiny_bert: Path, few_pairs: list[Task], capsys: pytest.CaptureFixture[str]
) -> None:
    export.main([str(run), str(tmp_path / "out"), "--precision", "fp32"])
    for words in (
        [str(tmp_path / "out"), "--template", "[X]"],
        [str(tmp_path / "out"), "--precision", "int8"],
        [str(run), "--precision", "int8"],
        [str(tiny_bert)],  # no configuration of its own
        [str(tmp_path / "nowhere")],
    ):
        capsys.readouterr()
        assert run_command(lambda words=words: evaluate.main([*words, "--data", "anywhere"])) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_the_parents_licence_is_read_from_its_card(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    assert parent_metadata(tmp_path, "license") is None
    for text, licence in (
        ('---\nlicense: "cc-by-4.0"\n---\n', "cc-by-4.0"),
        ("# no front matter\nlicense: mit\n", None),
        ("---\nlicense: mit\n", None),
        ("---\ntags: []\n---\nlicense: mit\n", None),
        ("---\nlicense: [mit\n---\n", None),
        ("---\n- mit\n---\n", None),
    ):
        card.write_text(text)
        assert parent_metadata(tmp_path, "license") == licence
    shutil.rmtree(tmp_path)
