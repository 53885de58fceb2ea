"""Templates from a tiny random T5: the search against all that could be found, scores against one example at a time."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer, set_seed

from cloze.command import run as run_command
from cloze.encoding.template import Template
from cloze.training.errors import CorpusError, EncoderError
from cloze.training.evaluation.t5 import Example, TemplateWriter, read_definitions
from cloze.training.model.pretrained import quiet
from cloze.training.templates import main

EXAMPLES = [Example("dog", "a pet."), Example("orange", "a large round fruit"), Example("rain", "rain")]
SPECIAL = ["<pad>", "</s>", "<unk>", "▁"]


def make(folder: Path, words: list[str], sentinels: int = 3) -> str:
    """A random T5 over these pieces, its output matrix padded beyond the tokenizer's vocabulary."""
    pieces = [(piece, 0.0) for piece in SPECIAL] + [(word, -3.0) for word in words]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=sentinels)
    set_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer) + 3, decoder_start_token_id=0, **sizes))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    words = [
        "▁also",
        "▁called",
        "▁means",
        "▁is",
        "▁a",
        "▁the",
        "▁dog",
        "▁rain",
        "▁large",
        "▁round",
        "▁fruit",
        "▁orange",
    ]
    return make(tmp_path_factory.mktemp("t5"), [*words, *"abcdefghilmnoprstu.:,"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TemplateWriter:
    """So few pieces that all gaps can be listed."""
    return TemplateWriter.load(make(tmp_path_factory.mktemp("tiny-t5"), ["▁dog", "."]))


def naive(writer: TemplateWriter, source: list[int], filled: list[int]) -> float:
    """Log-probability of `filled` and the last sentinel, of one example, by transformers' own cross entropy."""
    first, _, third = writer.sentinels
    labels = torch.tensor([[first, *filled, third]])
    with torch.no_grad():
        logits = writer.model(input_ids=torch.tensor([source]), labels=labels).logits[0]
    return -torch.nn.functional.cross_entropy(logits[1:], labels[0, 1:], reduction="sum").item()


@pytest.mark.parametrize("word_first", [True, False])
def test_a_score_is_the_sum_of_log_probabilities_over_the_examples(t5: str, word_first: bool) -> None:
    writer = TemplateWriter.load(t5)
    sources = writer.sources(EXAMPLES, word_first)
    assert len({len(source) for source in sources}) > 1  # padding is in it
    found = writer.search(sources, 6, 8)
    assert len(found) == 6
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    for filled, score in found:
        assert score == pytest.approx(sum(naive(writer, source, filled) for source in sources), rel=1e-4)


def test_with_beams_enough_the_search_finds_the_best_of_all(tiny: TemplateWriter) -> None:
    """Every way to fill two gaps with at most three of the three pieces, listed and scored one by one."""
    sources = tiny.sources(EXAMPLES, True)
    plain = tiny.plain.nonzero().flatten().tolist()
    assert len(plain) == 3
    gaps = [
        [*both[:cut], tiny.sentinels[1], *both[cut:]]
        for length in range(4)
        for both in itertools.product(plain, repeat=length)
        for cut in range(length + 1)
    ]
    scores = {tuple(filled): sum(naive(tiny, source, filled) for source in sources) for filled in gaps}
    best = sorted(scores, key=lambda filled: -scores[filled])
    found = tiny.search(sources, 200, 5)  # three pieces and the two sentinels that close the gaps
    assert [tuple(filled) for filled, _ in found] == best[:200]
    ((only, score),) = tiny.search(sources, 1, 5)
    assert score <= found[0][1] + 1e-4
    assert score == pytest.approx(scores[tuple(only)], rel=1e-4)


def test_the_order_of_the_examples_does_not_matter_and_rows_are_split(t5: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cloze.training.evaluation import t5 as module

    writer = TemplateWriter.load(t5)
    found = writer.write(EXAMPLES, 9)
    monkeypatch.setattr(module, "ROWS", 4)
    again = writer.write(EXAMPLES[::-1], 9)
    assert list(again) == list(found)
    assert list(again.values()) == pytest.approx(list(found.values()), rel=1e-4)


def test_what_is_written_are_templates_likeliest_first(t5: str) -> None:
    written = TemplateWriter.load(t5).write(EXAMPLES, 15)
    assert len(written) == 15
    assert list(written.values()) == sorted(written.values(), reverse=True)
    assert all(str(Template.parse(template, "mask")) == template for template in written)
    assert {template.startswith("[X]") for template in written} == {True, False}
    assert all(math.isfinite(score) and score < 0 for score in written.values())


def test_the_source_has_a_gap_on_either_side_of_the_word(t5: str) -> None:
    writer = TemplateWriter.load(t5)

    def decoded(word_first: bool) -> list[str]:
        names = writer.tokenizer.convert_ids_to_tokens(writer.sources([EXAMPLES[0]], word_first)[0])
        return "".join(names).replace("▁", " ").split()

    assert decoded(True) == ["<extra_id_0>", "dog<extra_id_1>", "a", "pet.</s>"]
    assert decoded(False) == ["a", "pet.<extra_id_0>", "dog<extra_id_1></s>"]


@pytest.mark.parametrize(
    ("first", "second", "word_first", "template"),
    [
        (["▁also", "▁called"], ["."], True, "also called [MASK]. [X]"),  # the paper's best, but for its capital
        (["▁also", "▁called"], ["▁means"], False, "[X] also called [MASK] means"),
        ([".", "▁is"], [], False, "[X]. is [MASK]"),
        ([], [":"], True, "[MASK]: [X]"),
        ([], [], False, "[X] [MASK]"),
    ],
)
def test_gaps_become_a_template(t5: str, first: list[str], second: list[str], word_first: bool, template: str) -> None:
    writer = TemplateWriter.load(t5)
    ids = writer.tokenizer.convert_tokens_to_ids
    assert writer._template([*ids(first), writer.sentinels[1], *ids(second)], word_first) == template


def test_definitions_are_read_from_every_form(tmp_path: Path) -> None:
    expected = [Example("dog", "a pet"), Example("orange", "a fruit")]
    for name, content in {
        "a.tsv": "definition\tword\na  pet\tdog\na fruit\torange \n",
        "a.csv": 'word,definition\ndog,a pet\norange,"a fruit"\n',
        "a.jsonl": "".join(json.dumps(example._asdict()) + "\n" for example in expected),
    }.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert read_definitions(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "word,meaning\ndog,a pet\n",
            "line 2: a word and a definition are required, but its columns are word, meaning",
        ),
        ("a.csv", "word,definition\ndog,a pet\norange,\n", "line 3: a word and a definition are required"),
        ("a.jsonl", '{"word": "a", "definition": 3}\n', "line 1: a word and a definition are required"),
        ("a.csv", "word,definition\n", "has no definitions"),
        ("a.txt", "dog\n", "has no columns"),
        ("gone.csv", None, "is not a file"),
    ],
)
def test_bad_definitions_name_the_line(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CorpusError, match=message):
        read_definitions(tmp_path / name)


def test_what_is_no_t5_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="cannot be loaded as a T5"):
        TemplateWriter.load(str(tiny_bert))
    with pytest.raises(EncoderError, match="cannot be loaded as a T5"):
        TemplateWriter.load(str(tmp_path))
    few = make(tmp_path / "few", ["▁dog"], sentinels=2)
    with pytest.raises(EncoderError, match="has no token <extra_id_2>; give a T5"):
        TemplateWriter.load(few)


@pytest.fixture
def files(tiny_bert: Path, tmp_path: Path) -> dict[str, Path]:
    dev, definitions = tmp_path / "dev.tsv", tmp_path / "definitions.csv"
    dev.write_text(
        "sentence1\tsentence2\tscore\nTwo dogs run.\tA dog runs.\t4.5\nRain.\tA city.\t1\nA man.\tThe guitar.\t2\n",
        encoding="utf-8",
    )
    rows = "".join(f"{word},{definition}\n" for word, definition in EXAMPLES)
    definitions.write_text("word,definition\n" + rows, encoding="utf-8")
    return {"bert": tiny_bert, "dev": dev, "definitions": definitions}


def test_what_a_t5_writes_is_ranked_on_the_dev_pairs(
    t5: str, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [files["bert"], "--dev", files["dev"], "--t5", t5, "--definitions", files["definitions"]]
    words += ["--count", 7, "--examples", 2, "--json", tmp_path / "found.json"]
    assert main(list(map(str, words))) is None
    shown = capsys.readouterr()
    assert "writes 7 templates for 2 of 3 definitions" in " ".join(shown.err.split())  # a long path wraps the line
    assert "T5's log-probability" in shown.out
    rows = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["templates"]
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    written = TemplateWriter.load(t5).write(EXAMPLES[:2], 7)
    assert {row["template"]: row["log_probability"] for row in rows} == pytest.approx(written, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--t5", "{bert}", "--definitions", "{definitions}"], "cannot be loaded as a T5"),
        (["--t5", "{bert}", "--definitions", "gone.csv"], "gone.csv is not a file"),
    ],
)
def test_bad_input_is_one_line(
    files: dict[str, Path], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(**files) for word in ["{bert}", "--dev", "{dev}", *arguments]]
    assert run_command(lambda: main(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--t5", "a"],
        ["--definitions", "a"],
        ["--t5", "a", "--definitions", "b", "--count", "0"],
        ["--t5", "a", "--templates", "b"],
    ],
)
def test_usage_errors_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: main(["encoder", "--dev", "dev.csv", *arguments])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --")
