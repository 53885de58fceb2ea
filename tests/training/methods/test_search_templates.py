"""A template for the column of queries and one for that of documents: in training, dev score, bundle and service."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contrastive_methods import TRIPLES, build
from test_retrieval import write as write_collection
from tiny_graphs import export_graphs_of

from cloze.encoding.bundle import Bundle
from cloze.encoding.errors import ClozeError
from cloze.training.evaluation.dev import DevData
from cloze.training.evaluation.options import ModelOptions
from cloze.training.evaluation.subjects import subjects
from cloze.training.export.__main__ import main as export
from cloze.training.fit import main
from cloze.training.methods.losses import info_nce
from cloze.training.model.encoder import SentenceEncoder

QUERY, DOCUMENT = "find: [X]", "it says: [X]"
COLUMNS = {"columns": ["a", "b", "c"]}
BOTH = {"query_template": [QUERY], "document_template": [DOCUMENT]}


@pytest.mark.parametrize(
    ("templates", "words"),
    [
        (BOTH, (QUERY, DOCUMENT, DOCUMENT)),
        ({"query_template": [QUERY]}, (QUERY, "[X]", "[X]")),
        ({"document_template": [DOCUMENT]}, ("[X]", DOCUMENT, DOCUMENT)),
        ({}, ("[X]", "[X]", "[X]")),
    ],
)
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_loss_is_that_of_each_columns_own_words(
    templates: dict[str, list[str]], words: tuple[str, ...], pooling: str, tiny_bert: Path
) -> None:
    """Equation 5 on texts that were put into their words by hand."""
    objective = build("simcse", tiny_bert, dropout=False, pooling=[pooling], **COLUMNS, **templates)
    columns = [
        [words.replace("[X]", text) for text in texts]
        for words, texts in zip(words, zip(*TRIPLES, strict=True), strict=True)
    ]
    with torch.no_grad():
        loss = objective(**objective.views(TRIPLES))["loss"]
        vectors = [objective.head(torch.from_numpy(objective.encoder.embed(texts))) for texts in columns]
    torch.testing.assert_close(loss, info_nce(*vectors[:2], objective.recipe.temperature, vectors[2]))


def test_the_parents_templates_are_kept(tmp_path: Path, tiny_bert: Path) -> None:
    encoder = build("simcse", tiny_bert, **COLUMNS, **BOTH).encoder
    encoder.save(tmp_path / "parent")
    assert build("simcse", tmp_path / "parent").encoder.config.templates == {"query": QUERY, "document": DOCUMENT}
    other = build("simcse", tmp_path / "parent", **COLUMNS, query_template=["ask: [X]"]).encoder
    assert other.config.templates == {"query": "ask: [X]", "document": DOCUMENT}


def test_pairs_train_in_the_parents_templates(tmp_path: Path, tiny_bert: Path) -> None:
    build("simcse", tiny_bert, **COLUMNS, **BOTH).encoder.save(tmp_path / "parent")
    found, expected = (
        build("simcse", folder, dropout=False, **COLUMNS, **words).views(TRIPLES)
        for folder, words in ((tmp_path / "parent", {}), (tiny_bert, BOTH))
    )
    for name, view in expected.items():
        torch.testing.assert_close(found[name]["input_ids"], view["input_ids"])


def test_templates_that_do_not_fit_the_pooling_are_left_out(
    tmp_path: Path, tiny_bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build("simcse", tiny_bert, **COLUMNS, **BOTH).encoder.save(tmp_path / "parent")
    (tmp_path / "corpus.txt").write_text("".join(f"a sentence {number}\n" for number in range(8)))
    keys = ["--encoder", str(tmp_path / "parent"), "--corpus", str(tmp_path / "corpus.txt"), "--batch-size", "4"]
    assert not main(["promptbert", "--out", str(tmp_path / "run"), *keys, "--max-steps", "1"])
    assert "skipped the parent's template 'query': " in capsys.readouterr().err
    assert SentenceEncoder.load(str(tmp_path / "run" / "model")).config.templates == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (BOTH, "query_template is set, but columns names 0; queries and documents are two columns of the corpus"),
        (COLUMNS | {"query_template": ["no place"]}, "query_template: .*no place"),
        (COLUMNS | {"document_template": ["[X] [MASK]"]}, r"document_template: .*\[MASK\]"),
        (
            COLUMNS | {"pooling": ["mask"], "template": ["[X] is [MASK]."], "query_template": ["[X] asks [MASK] !!"]},
            "template query .* has .MASK. at position -4, but template .* at -3; write the same words",
        ),
    ],
)
def test_templates_that_cannot_be_are_refused(words: dict[str, Any], message: str, tiny_bert: Path) -> None:
    with pytest.raises(ClozeError, match=message):
        build("simcse", tiny_bert, **words)


@pytest.mark.long
def test_dev_score_evaluation_and_bundle_use_them(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [dict(zip("abc", (f"{text} {n}" for text in row), strict=True)) for n in range(8) for row in TRIPLES]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    collection = write_collection(tmp_path / "compass")
    run = tmp_path / "run"
    keys = ["--encoder", str(tiny_bert), "--corpus", str(rows), "--columns", "a", "b", "c", "--dev", str(collection)]
    keys += ["--query-template", QUERY, "--document-template", DOCUMENT, "--batch-size", "8"]
    assert not main(["simcse", "--out", str(run), *keys])

    encoder = SentenceEncoder.load(str(run / "model"))
    assert encoder.config.templates == {"query": QUERY, "document": DOCUMENT}
    queries, documents = (encoder.named(name).embed for name in ("query", "document"))
    np.testing.assert_array_equal(queries(["east"]), encoder.embed(["find: east"]))
    score = DevData.load([str(collection)]).score(encoder.embed, queries, documents)
    assert json.loads((run / "run.json").read_text())["dev_score"] == pytest.approx(score["ndcg"])
    (subject,) = subjects(str(run), ModelOptions())
    np.testing.assert_array_equal(subject.embed_documents(["east"]), encoder.embed(["it says: east"]))

    export_graphs_of(tiny_bert, monkeypatch)
    assert not export([str(run), str(tmp_path / "bundle")])
    bundle = Bundle.load(str(tmp_path / "bundle"))
    assert bundle.named["query"].encode(["east"])[0].ids == bundle.text_encoder.encode(["find: east"])[0].ids
