"""The mean of runs: its weights, what it says about them, and what it refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_graphs import export_graphs_of

from cloze.command import run as run_command
from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import OptionError
from cloze.training.average import main
from cloze.training.errors import EncoderError, RunError
from cloze.training.export.__main__ import main as export
from cloze.training.loop.soup import average
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.run_folder import Run, parent_name

RECIPE = {"method": "simcse", "encoder": "parents/tiny", "corpus": ["a.txt"]}


def make_run(
    folder: Path, tiny: Path, seed: int, template: str = 'This sentence of "[X]" means [MASK].', parent: str = "tiny"
) -> Path:
    encoder = SentenceEncoder.load(str(tiny), template=template, pooling="mask", max_tokens=32 + seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight += 0.01 * torch.randn_like(weight)
    encoder.save(folder / "model")
    source = {"name": "a.txt", "sentences": 9, "sha256": f"{seed:064x}"}
    provenance = {"parent": parent, "recipe": RECIPE, "data": [source], "commit": None, "seeds": [seed], "rows": seed}
    (folder / "run.json").write_text(json.dumps(provenance | {"versions": {}}), encoding="utf-8")
    return folder


def name_encoder(run: Path, encoder: Path) -> None:
    file = run / "run.json"
    provenance = json.loads(file.read_text(encoding="utf-8"))
    provenance["recipe"]["encoder"] = str(encoder)
    file.write_text(json.dumps(provenance), encoding="utf-8")


@pytest.fixture(autouse=True)
def graphs(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at here is the card and the provenance."""
    export_graphs_of(tiny_bert, monkeypatch)


@pytest.fixture
def runs(tiny_bert: Path, tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / f"run-{seed}", tiny_bert, seed) for seed in (1, 2)]


def test_weights_are_the_weighted_mean(runs: list[Path], tmp_path: Path) -> None:
    main([*map(str, runs), "--out", str(tmp_path / "mean"), "--weights", "3", "1"])
    first, second, mean = (SentenceEncoder.load(str(run / "model")) for run in (*runs, tmp_path / "mean"))
    names = dict(mean.named_parameters())
    assert names
    for name, found in names.items():
        expected = 0.75 * first.get_parameter(name) + 0.25 * second.get_parameter(name)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert mean.config.max_tokens == 34


def test_the_parent_has_its_share(runs: list[Path], tiny_bert: Path, tmp_path: Path) -> None:
    name_encoder(runs[0], tiny_bert)
    average(runs, tmp_path / "mean", [3, 1], parent_share=0.2)
    average(runs[:1], tmp_path / "half", parent_share=0.5)
    first, second = (SentenceEncoder.load(str(run / "model")) for run in runs)
    parent = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    mean, half = (SentenceEncoder.load(str(tmp_path / name / "model")) for name in ("mean", "half"))
    for name, weight in parent.named_parameters():
        expected = 0.2 * weight + 0.8 * (0.75 * first.get_parameter(name) + 0.25 * second.get_parameter(name))
        torch.testing.assert_close(mean.get_parameter(name), expected, rtol=1e-6, atol=1e-7)
        expected = 0.5 * (weight + first.get_parameter(name))
        torch.testing.assert_close(half.get_parameter(name), expected, rtol=1e-6, atol=1e-7)
    assert half.config == first.config
    export([str(tmp_path / "half"), str(tmp_path / "bundle")])
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert "cloze average RUN-1 --out RUN --weights 1 --parent-share 0.5\n" in card
    assert "The weights are 0.5 of the trained ones and 0.5 of the parent's." in card


def test_the_parent_of_a_continued_run_may_be_named(runs: list[Path], tiny_bert: Path, tmp_path: Path) -> None:
    """The first run continues the second, whose weights its recipe names as its encoder."""
    name_encoder(runs[0], runs[1] / "model")
    average(runs[:1], tmp_path / "mean", parent_share=0.25, parent=str(tiny_bert))
    continued = SentenceEncoder.load(str(runs[0] / "model"))
    parent = SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="mean")
    mean = SentenceEncoder.load(str(tmp_path / "mean" / "model"))
    for name, weight in parent.named_parameters():
        expected = 0.25 * weight + 0.75 * continued.get_parameter(name)
        torch.testing.assert_close(mean.get_parameter(name), expected, rtol=1e-6, atol=1e-7)
    export([str(tmp_path / "mean"), str(tmp_path / "bundle")])
    assert Bundle.load(tmp_path / "bundle").spec.provenance.parent == tiny_bert.name
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert f"--weights 1 --parent-share 0.25 --parent {tiny_bert.name}\n" in card
    with pytest.raises(EncoderError, match="nowhere"):
        average(runs[:1], tmp_path / "other", parent_share=0.25, parent="./nowhere")


def test_a_run_and_its_continuation_are_averaged_if_their_parent_is_named(
    runs: list[Path], tiny_bert: Path, tmp_path: Path
) -> None:
    continued = make_run(tmp_path / "continued", tiny_bert, 3, parent="model")
    with pytest.raises(RunError, match="have different parents"):
        average([runs[0], continued], tmp_path / "mean")
    average([runs[0], continued], tmp_path / "mean", parent=str(tiny_bert))
    provenance = json.loads((tmp_path / "mean" / "run.json").read_text(encoding="utf-8"))
    assert provenance["parent"] == tiny_bert.name
    export([str(tmp_path / "mean"), str(tmp_path / "bundle")])
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert f"--out RUN --weights 1 1 --parent {tiny_bert.name}\n" in card


def test_a_run_is_averaged_once(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(runs[0])
    with pytest.raises(
        RunError, match="link is named twice; name each run once, or give the share of each with --weights"
    ):
        average([*runs, tmp_path / "link"], tmp_path / "mean")


def test_a_parent_that_is_gone_is_named(runs: list[Path], tmp_path: Path) -> None:
    name_encoder(runs[0], tmp_path / "gone")
    with pytest.raises(EncoderError, match="gone' cannot be loaded as an encoder: it is not a folder"):
        average(runs, tmp_path / "mean", parent_share=0.1)
    assert not (tmp_path / "mean").exists()


def test_weights_may_be_of_any_size(runs: list[Path], tmp_path: Path) -> None:
    average(runs, tmp_path / "plain")
    average(runs, tmp_path / "huge", [1e308, 1e308])
    plain, huge = (SentenceEncoder.load(str(tmp_path / name / "model")) for name in ("plain", "huge"))
    assert torch.equal(plain.word_embeddings.weight, huge.word_embeddings.weight)


def test_a_mean_of_equals_is_the_same(runs: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs[0], copy)
    average([runs[0], copy], tmp_path / "mean")
    texts = ["two dogs run", "rain"]
    same = SentenceEncoder.load(str(tmp_path / "mean" / "model")).embed(texts)
    np.testing.assert_array_equal(same, SentenceEncoder.load(str(runs[0] / "model")).embed(texts))


def test_a_bundle_tells_of_all_its_runs(runs: list[Path], tmp_path: Path) -> None:
    average(runs, tmp_path / "mean", [2, 1])
    export([str(tmp_path / "mean"), str(tmp_path / "bundle")])
    provenance = Bundle.load(tmp_path / "bundle").spec.provenance
    assert provenance.parent == "tiny"
    assert provenance.seeds == [1, 2]
    assert [source.sha256[-1] for source in provenance.data] == ["1", "2"]
    assert provenance.recipe["runs"] == [RECIPE, RECIPE]
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert "cloze average RUN-1 RUN-2 --out RUN --weights 2 1" in card
    assert card.count('method = "simcse"') == 2


def test_a_mean_with_a_run_of_adapt_names_its_command(runs: list[Path], tmp_path: Path) -> None:
    provenance = json.loads((runs[0] / "run.json").read_text(encoding="utf-8"))
    inputs = {"pairs": ["log.csv"], "columns": [], "documents": ["docs"], "document_columns": []}
    provenance["recipe"] = {"method": "adapt", "encoder": "parents/tiny", "seed": 7} | inputs
    (runs[0] / "run.json").write_text(json.dumps(provenance), encoding="utf-8")
    average(runs, tmp_path / "mean")
    export([str(tmp_path / "mean"), str(tmp_path / "bundle")])
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    command = "cloze adapt --encoder parents/tiny --pairs log.csv --documents docs --seed 7 --out RUN"
    assert f"```sh\n{command}\n```" in card
    assert f"{command}-1\ncloze fit recipe-2.toml --out RUN-2\ncloze average RUN-1 RUN-2" in card
    assert 'method = "adapt"' not in card


def test_what_has_no_mean_is_refused(runs: list[Path], tiny_bert: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", tiny_bert, 3, template="[X] [MASK]")
    stranger = make_run(tmp_path / "stranger", tiny_bert, 3, parent="base")
    cases = {
        "have different embedding configurations": [runs[0], other],
        "have different parents": [runs[0], stranger],
        "needs two runs or more, or --parent-share; found 1": runs[:1],
        "is not a run": [runs[0], tiny_bert],
    }
    for run in runs:  # as if each had begun with other weights
        (run / "inputs.json").write_text(json.dumps({"encoder parents/tiny": run.name}), encoding="utf-8")
    cases["have different parents with the same name, 'tiny'; average runs that share one"] = runs
    for message, given in cases.items():
        with pytest.raises(RunError, match=message):
            average(given, tmp_path / "mean")
    with pytest.raises(RunError, match="3 weights for 2 runs"):
        average(runs, tmp_path / "mean", [1, 1, 1])
    with pytest.raises(RunError, match="is not an empty folder"):
        average(runs, runs[0])
    assert not (tmp_path / "mean").exists()


def test_a_run_with_a_masked_word_head_is_refused(runs: list[Path], tmp_path: Path) -> None:
    """The mean would have none, and so could not be explained, or trained on as such a model."""
    provenance = Run(runs[1]).provenance()
    Run(runs[1]).write_provenance(provenance | {"recipe": provenance["recipe"] | {"method": "mlm"}})
    with pytest.raises(RunError, match="run-2 is a run of cloze pretrain, and a mean would lose its masked-word head"):
        average(runs, tmp_path / "mean")


def test_mistakes_are_one_line(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: main([str(runs[0]), "--out", str(tmp_path / "mean")])) == 2
    assert capsys.readouterr().err.startswith("error: a mean needs two runs")
    words = [*map(str, runs), "--out", str(tmp_path / "mean")]
    for word in ("0", "-1", "nan", "much"):
        assert run_command(lambda word=word: main([*words, f"--weights={word}"])) == 2
        assert capsys.readouterr().err.startswith(f"error: --weights is '{word}': input should be ")


def test_a_mean_of_means_tells_of_the_runs_behind_it(runs: list[Path], tiny_bert: Path, tmp_path: Path) -> None:
    for run in runs:
        name_encoder(run, tiny_bert)
    average(runs, tmp_path / "mean", [3, 1], parent_share=0.2)
    average([tmp_path / "mean", runs[1]], tmp_path / "again", [1, 1], parent_share=0.1)
    found = json.loads((tmp_path / "again" / "run.json").read_text(encoding="utf-8"))["recipe"]
    assert [run["method"] for run in found["runs"]] == ["simcse"] * 3
    assert found["weights"] == pytest.approx([0.45 * 0.8 * 0.75, 0.45 * 0.8 * 0.25, 0.45])
    assert found["parent_share"] == pytest.approx(0.1 + 0.45 * 0.2)
    at_once = average([runs[0], runs[1], runs[1]], tmp_path / "at-once", found["weights"], found["parent_share"])
    assert at_once is None
    one, other = (SentenceEncoder.load(str(tmp_path / name / "model")).state_dict() for name in ("again", "at-once"))
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-5, atol=1e-6)
    name_encoder(runs[0], tmp_path / "elsewhere")
    with pytest.raises(
        RunError, match=r"one of the runs is a mean that includes .*; average the runs that it was made from"
    ):
        average([runs[0], tmp_path / "mean"], tmp_path / "mixed")


def test_a_folder_that_cannot_be_made_is_one_line(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"cannot be written to .*; choose another folder"):
        average(runs, tmp_path / "file" / "mean")


def test_a_run_that_continues_a_mean_names_it(runs: list[Path], tmp_path: Path) -> None:
    average(runs, tmp_path / "mean")
    assert parent_name(str(tmp_path / "mean" / "model")) == "mean"
    (tmp_path / "other" / "model").mkdir(parents=True)
    assert parent_name(str(tmp_path / "other" / "model")) == "model"
