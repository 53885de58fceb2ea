"""The order of the greedy search, one encoder under many templates, and the command as a user runs it."""

import json
from pathlib import Path

import numpy as np
import pytest

from cloze.command import run as run_command
from cloze.encoding.errors import TemplateError
from cloze.training.evaluation.sts import load_pairs, spearman
from cloze.training.evaluation.templates import (
    PREFIXES,
    RELATIONS,
    Scorer,
    greedy,
    rank,
    read_templates,
    related,
    wrapped,
)
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.templates import main

TABLE_4 = {  # PromptBERT: BERT base on STS-B dev
    "[X] [MASK].": 39.34,
    "[X] is [MASK].": 47.26,
    "[X] mean [MASK].": 53.94,
    "[X] means [MASK].": 63.56,
    "This [X] means [MASK].": 64.19,
    "This sentence of [X] means [MASK].": 68.97,
    'This sentence of "[X]" means [MASK].': 70.19,
    'This sentence : "[X]" means [MASK].': 73.44,
}


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dev") / "dev.tsv"
    pairs = [
        ("Two dogs run.", "A dog runs.", 4.5),
        ("Two dogs run", "The market fell.", 0.3),
        ("Rain.", "A city.", 1.0),
        ("A man is playing the guitar on a stage.", "A man plays", 4.0),
        ("She wrote a letter", "Her old friend in the city.", 1.5),
        ("Nothing grows here.", "A little rain falls here without a sound", 2.0),
    ]
    path.write_text("sentence1\tsentence2\tscore\n" + "".join(f"{a}\t{b}\t{c}\n" for a, b, c in pairs), "utf-8")
    return path


def test_the_default_search_is_table_4_and_finds_its_winner() -> None:
    asked: list[str] = []
    found = greedy(lambda template: asked.append(template) or TABLE_4[template])
    assert asked == list(TABLE_4)
    assert list(found.items()) == sorted(TABLE_4.items(), key=lambda item: -item[1])
    assert next(iter(found)) == 'This sentence : "[X]" means [MASK].'


def test_prefixes_go_before_the_best_relation_alone() -> None:
    """Greedy: a prefix that would do better before another relation is not tried there."""
    scores = {"[X] a [MASK].": 1.0, "[X] b [MASK].": 2.0, "So [X] b [MASK].": 0.5}
    found = greedy(scores.__getitem__, ["a", "b"], ["So"])
    assert found == scores
    assert list(found) == ["[X] b [MASK].", "[X] a [MASK].", "So [X] b [MASK]."]
    assert greedy(scores.__getitem__, ["a", "b"], []) == {"[X] b [MASK].": 2.0, "[X] a [MASK].": 1.0}


def test_the_same_template_is_scored_once() -> None:
    asked: list[str] = []
    rank(lambda template: asked.append(template) or 0.0, ["b", "a", "b"])
    assert asked == ["b", "a"]
    asked.clear()
    greedy(lambda template: asked.append(template) or 0.0, ["is", "is"], ["This", "This [X]"])
    assert asked == ["[X] is [MASK].", "This [X] is [MASK]."]


def test_words_become_templates() -> None:
    assert [related(words) for words in ("", "is", " is  called ")] == [
        "[X] [MASK].",
        "[X] is [MASK].",
        "[X] is called [MASK].",
    ]
    assert [wrapped("[X] is [MASK].", words) for words in ("This", "This : '[X]'", "")] == [
        "This [X] is [MASK].",
        "This : '[X]' is [MASK].",
        "[X] is [MASK].",
    ]


@pytest.mark.parametrize("denoise", [False, True])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_score_is_that_of_an_encoder_loaded_with_the_template(
    family: str, denoise: bool, tiny_bert: Path, tiny_roberta: Path, dev: Path
) -> None:
    source = str({"bert": tiny_bert, "roberta": tiny_roberta}[family])
    pairs = load_pairs(dev)
    scorer = Scorer(SentenceEncoder.load(source, template="[X]", pooling="cls"), pairs, denoise)
    scores = []
    for template in ("[X] means [MASK].", '[MASK] : "[X]"', "[X] means [MASK]."):  # the one before leaves no trace
        alone = SentenceEncoder.load(source, template=template, pooling="mask", denoising=denoise)
        np.testing.assert_array_equal(alone.embed(pairs.left), (scorer(template), scorer.encoder.embed(pairs.left))[1])
        scores.append(scorer(template))
        assert scores[-1] == spearman(alone.embed, pairs)
    assert scores[0] == scores[2]


def search(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, dict[str, float]]:
    """Template -> what --json says of it, once the table on stdout was found to say the same."""
    assert main([str(word) for word in arguments]) is None
    content = json.loads(Path(arguments[arguments.index("--json") + 1]).read_text(encoding="utf-8"))
    lines = [line.strip("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    table = [[cell.strip() for cell in line.split("│")] for line in lines]
    rows = content["templates"]
    assert table == [[row["template"], f"{row['score']:.2f}", str(row["tokens"])] for row in rows]
    return {row.pop("template"): row for row in rows}


def test_greedy_search_end_to_end(
    tiny_bert: Path, dev: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = search(capsys, tiny_bert, "--dev", dev, "--json", tmp_path / "found.json")
    assert len(found) == len(RELATIONS) + len(PREFIXES)
    assert [row["score"] for row in found.values()] == sorted((row["score"] for row in found.values()), reverse=True)
    best = max(map(related, RELATIONS), key=lambda template: found[template]["score"])
    assert {wrapped(best, prefix) for prefix in PREFIXES} < set(found)
    assert found["[X] [MASK]."]["tokens"] == 4  # [CLS] [MASK] . [SEP]
    given = search(
        capsys, tiny_bert, "--dev", dev, "--json", tmp_path / "b.json", "--relations", "is", "", "--prefixes", "So"
    )
    assert len(given) == 3
    assert given["[X] is [MASK]."] == found["[X] is [MASK]."]
    about = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    del about["templates"]
    assert about == {"encoder": str(tiny_bert), "dev": "dev.tsv", "denoise": False, "final_period": False}


def test_a_file_of_templates_read_in_other_ways(
    tiny_bert: Path, dev: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "templates.txt"
    listed.write_text('[X] means [MASK].\n\n  [MASK] : "[X]"\n[X] means [MASK].\n[link] [X] [MASK]\n', encoding="utf-8")

    def scores(*options: str) -> dict[str, float]:
        found = search(
            capsys, tiny_bert, "--dev", dev, "--templates", listed, "--json", tmp_path / "found.json", *options
        )
        assert set(found) == {"[X] means [MASK].", '[MASK] : "[X]"', "[link] [X] [MASK]"}
        return {template: row["score"] for template, row in found.items()}

    plain = scores()
    for options, changes in {
        ("--denoise",): {"denoising": True},
        ("--final-period",): {"final_period": True},
        ("--max-tokens", "12"): {"max_tokens": 12},
    }.items():
        encoder = SentenceEncoder.load(str(tiny_bert), template="[X] means [MASK].", pooling="mask", **changes)
        other = scores(*options)
        assert other["[X] means [MASK]."] == spearman(encoder.embed, load_pairs(dev))
        assert other != plain


def test_a_run_is_searched_as_well(
    tiny_bert: Path, dev: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = SentenceEncoder.load(
        str(tiny_bert), template="[X]", pooling="mean", final_period=True, max_tokens=30, denoising=True
    )
    encoder.save(tmp_path / "run" / "model")
    (tmp_path / "run" / "run.json").write_text("{}", encoding="utf-8")
    found = search(
        capsys, tmp_path / "run", "--dev", dev, "--json", tmp_path / "a.json", "--relations", "is", "--prefixes"
    )
    alone = SentenceEncoder.load(
        str(tiny_bert), template="[X] is [MASK].", pooling="mask", final_period=True, max_tokens=30
    )
    assert found["[X] is [MASK]."]["score"] == spearman(alone.embed, load_pairs(dev))


def test_bad_lines_are_named_before_anything_is_scored(tiny_bert: Path, dev: Path, tmp_path: Path) -> None:
    scorer = Scorer(SentenceEncoder.load(str(tiny_bert), template="[X]", pooling="cls"), load_pairs(dev))
    listed = tmp_path / "templates.txt"
    for line, message in {
        "no place": r"line 3: template 'no place' has \[X\] 0 times",
        "[X] alone": r"line 3: .* has \[MASK\] 0 times",
        "[X] <mask>": r"line 3: .* write \[MASK\] instead of <mask>",
        "dogs " * 70 + "[X] [MASK]": r"line 3: .* takes 73 tokens and max_tokens is 64",
    }.items():
        listed.write_text(f"[X] [MASK]\n\n{line}\n", encoding="utf-8")
        with pytest.raises(TemplateError, match=message):
            read_templates(listed, scorer)


@pytest.fixture
def maskless(tiny_bert: Path, tmp_path: Path) -> Path:
    from transformers import AutoTokenizer, BertModel, PreTrainedTokenizerFast

    folder = tmp_path / "maskless"
    roles = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    backend = AutoTokenizer.from_pretrained(tiny_bert).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(folder)
    BertModel.from_pretrained(tiny_bert, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone", "--dev", "{dev}"], "gone is not complete in the local cache"),
        (["{maskless}", "--dev", "{dev}"], "has no mask token, which mask pooling requires"),
        (["{bert}", "--dev", "{dev}", "--templates", "gone.txt"], "gone.txt is not a file"),
        (["{bert}", "--dev", "{dev}", "--templates", "{empty}"], "has no templates; write one per line"),
        (["{bert}", "--dev", "{dev}", "--templates", "{dev}"], "line 1: template"),
        (["{bert}", "--dev", "{dev}", "--relations", "is [MASK]"], "has [MASK] 2 times"),
        (["{bert}", "--dev", "{dev}", "--json", "no/such/folder/found.json"], "no/such/folder is not a folder"),
        (["gone", "--dev", "gone.csv"], "gone.csv is not a file"),  # the quicker first
        (["{bert}", "--dev", "{dev}", "--max-tokens", "9000"], "has positions for 64"),
    ],
)
def test_bad_input_is_one_line(
    tiny_bert: Path,
    maskless: Path,
    dev: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "empty.txt").write_text("\n \n", encoding="utf-8")
    names = {"bert": tiny_bert, "dev": dev, "maskless": maskless, "empty": folder / "empty.txt", "folder": folder}
    words = [word.format(**names) for word in arguments]
    capsys.readouterr()
    assert run_command(lambda: main(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
