"""Token weights of a corpus: what the command counts and writes, its bundles and their cards, and what it refuses."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from saved_models import edit, model_of
from sentence_transformers.base.modules import Dense
from test_average import make_run
from tiny_graphs import export_graphs_of

from cloze.command import run as run_command
from cloze.encoding.bundle import Bundle
from cloze.training.average import main as average
from cloze.training.export.__main__ import main as export
from cloze.training.fit import main as fit
from cloze.training.hub.adoption import load_sentence_transformer
from cloze.training.hub.sentence_transformer import write
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.run_folder import Run
from cloze.training.weigh import main

LINES = ["two dogs run over the city", "the rain over the city", "the letter", "a man", "the"]
TEXTS = ["two dogs run over the city", "the the letter", ""]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def run(tiny_bert: Path, tmp_path: Path, corpus: Path) -> Path:
    """One step of training, by a mean."""
    keys = ["--encoder", str(tiny_bert), "--corpus", str(corpus), "--batch-size", "2", "--max-steps", "1"]
    keys += ["--held-out", "0", "--pooling", "mean", "--max-tokens", "48", "--out", str(tmp_path / "run")]
    assert fit(["simcse", *keys]) == 0
    return tmp_path / "run"


def table(model: Path) -> dict[str, float]:
    encoder = SentenceEncoder.load(str(model))
    assert encoder.token_weights is not None
    weights = encoder.token_weights.table.squeeze(1).tolist()
    return {word: weights[place] for word, place in encoder.tokenizer.get_vocab().items()}


def test_words_are_counted(run: Path, corpus: Path, tmp_path: Path) -> None:
    Run(run).write_provenance(Run(run).provenance() | {"dev_score": 11.0, "below_parent": True})
    main([str(run), "--corpus", str(corpus), "--smoothing", "0.1", "--out", str(tmp_path / "weighed")])
    found = table(tmp_path / "weighed" / "model")
    counts = Counter(word for line in LINES for word in line.split())
    for word, count in counts.items():
        assert found[word] == pytest.approx(0.1 / (0.1 + count / counts.total()), abs=1e-3)
    assert found["[CLS]"] == found["[SEP]"] == found["guitar"] == 1
    before, after = (SentenceEncoder.load(str(path / "model")) for path in (run, tmp_path / "weighed"))
    assert after.config == before.config
    assert not {"dev_score", "held_out_loss", "below_parent"} & Run(tmp_path / "weighed").provenance().keys()
    assert np.abs(after.embed(TEXTS) - before.embed(TEXTS)).max() > 1e-3


def test_the_words_of_a_template_are_counted_with_each_text(tiny_bert: Path, corpus: Path, tmp_path: Path) -> None:
    encoder = SentenceEncoder.load(str(tiny_bert), template="a letter : [X]", pooling="mean")
    encoder.save(tmp_path / "encoder")
    main([str(tmp_path / "encoder"), "--corpus", str(corpus), "--out", str(tmp_path / "weighed")])
    found = table(tmp_path / "weighed" / "model")
    assert found["letter"] < found["the"] < found["rain"] < found["guitar"] == 1


def test_a_bundle_of_it_names_the_text_and_is_trained_further(run: Path, corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "texts.csv"
    other.write_text("title,text\nrain,the city\n,a man\n", encoding="utf-8")
    words = ["--corpus", str(other), "--columns", "title", "text", "--smoothing", "0.5"]
    main([str(run), *words, "--out", str(tmp_path / "weighed")])
    export([str(tmp_path / "weighed"), str(tmp_path / "bundle"), "--precision", "fp32"])
    provenance = Bundle.load(tmp_path / "bundle").spec.provenance
    assert [source.name for source in provenance.data] == ["lines.txt", "texts.csv"]
    assert provenance.recipe["token_weights"] == {
        "smoothing": 0.5,
        "corpus": ["texts.csv"],
        "columns": ["title", "text"],
    }
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert "The more often a token occurs in a corpus, the less it counts in the mean." in card
    assert "a token that makes up the share p of texts.csv has the weight 0.5 / (0.5 + p), a special one 1." in card
    command = "cloze weigh RUN --corpus texts.csv --columns title text --smoothing 0.5 --out WEIGHED\n"
    assert f"--out RUN\n{command}cloze export WEIGHED OUT" in card
    assert "token_weights" not in card
    trained, read = (SentenceEncoder.load(str(path)) for path in (tmp_path / "weighed" / "model", tmp_path / "bundle"))
    assert trained.token_weights is not None
    assert read.token_weights is not None
    np.testing.assert_array_equal(read.token_weights.table, trained.token_weights.table)

    main([str(tmp_path / "bundle"), "--corpus", str(corpus), "--out", str(tmp_path / "again")])
    assert table(tmp_path / "again" / "model")["the"] != table(tmp_path / "weighed" / "model")["the"]
    found = json.loads((tmp_path / "again" / "run.json").read_text(encoding="utf-8"))
    assert found["parent"] == "bundle"
    assert [source["name"] for source in found["data"]] == ["lines.txt", "texts.csv"]


def test_an_encoder_needs_no_training(
    tiny_bert: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_graphs_of(tiny_bert, monkeypatch)  # what is looked at here is the card
    main([str(tiny_bert), "--corpus", str(corpus), "--out", str(tmp_path / "weighed")])
    export([str(tmp_path / "weighed"), str(tmp_path / "bundle")])
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert f"{tiny_bert.name} was not trained further." in card
    assert f"With {tiny_bert.name} in `RUN`:\n\n```sh\ncloze weigh RUN --corpus lines.txt" in card


def test_a_model_of_the_library_keeps_its_limit_and_prompts(tiny_bert: Path, corpus: Path, tmp_path: Path) -> None:
    model = model_of(tmp_path, tiny_bert)
    edit(model / "config_sentence_transformers.json", prompts={"query": "find: "})
    main([str(model), "--corpus", str(corpus), "--out", str(tmp_path / "weighed")])
    found = SentenceEncoder.load(str(tmp_path / "weighed"))
    assert found.config == load_sentence_transformer(str(model), TEXTS).config
    assert found.token_weights is not None


def test_what_cannot_be_weighed_is_one_line(
    run: Path, tiny_bert: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masked = make_run(tmp_path / "masked", tiny_bert, 1)
    main([str(run), "--corpus", str(corpus), "--out", str(tmp_path / "weighed")])
    library = tmp_path / "library"  # of sentence-transformers
    library.mkdir()
    write(SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls"), library, TEXTS)
    dense = model_of(tmp_path, tiny_bert, "bert", "mean", Dense(32, 24))
    joined = model_of(tmp_path / "joined", tiny_bert, "bert", ("mean", "max"))
    out = tmp_path / "out"
    cases = {
        f"{joined}' concatenates the poolings": [str(joined)],
        f"{dense} has layers after its pooling, which a run cannot include": [str(dense)],
        f"{library} has cls pooling, but token weights need mean pooling": [str(library)],
        f"{masked} has mask pooling, but token weights need mean pooling": [str(masked)],
        "is not an empty folder; choose another --out": [str(run), "--out", str(run / "model")],
        "nowhere is not a folder": ["./nowhere"],
        "no-file.txt": [str(run), "--corpus", "no-file.txt"],
        "error: --smoothing is '0'": [str(run), "--smoothing", "0"],
    }
    for message, words in cases.items():
        given = ["--corpus", str(corpus)] if "--corpus" not in words else []
        given += ["--out", str(out)] if "--out" not in words else []
        capsys.readouterr()
        assert run_command(lambda words=[*words, *given]: main(words)) == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert shown.count("\n") == 1
    assert run_command(lambda: average([str(run), str(tmp_path / "weighed"), "--out", str(out)])) == 2
    assert "weighed came from cloze weigh; average the runs first" in capsys.readouterr().err
    assert not out.exists()
