"""evaluate --top-k and --denoise: the rows of PromptBERT's Table 9."""

import json
import shutil
from pathlib import Path

import pytest
from torch import nn

from cloze.command import run as run_command
from cloze.training import evaluate
from cloze.training.evaluation.measures import Pairs
from cloze.training.evaluation.sts import DEV_TASKS, STS_TASKS, spearman
from cloze.training.evaluation.suites.sts import StsTask
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead, MaskedWords, save_masked_lm

WORDS = ["dog", "man", "letter", "city", "rain", "guitar", "market", "friend", "field", "stage"]
PAIRS = Pairs(
    [f"The {left} runs" for left in WORDS for _ in WORDS],
    [f"A {right} and a {left}." for left in WORDS for right in WORDS],
    [float((7 * number) % 101) for number in range(100)],
)  # enough of them, and of no meaning: each way to read them has a figure of its own


@pytest.fixture
def model(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    tasks = [StsTask(name, {name: PAIRS}) for name in (*STS_TASKS, *DEV_TASKS)]
    monkeypatch.setattr("cloze.training.evaluation.evaluate.load_suites", lambda *_: tasks)
    monkeypatch.chdir(tmp_path)  # the cache is a folder below it
    encoder = SentenceEncoder.load(str(tiny_bert), template='"[X]" means [MASK].', pooling="mask")
    head = MaskedHead(encoder.backbone.config)
    nn.init.normal_(head.bias)
    encoder.save(tmp_path / "model")
    save_masked_lm(encoder.backbone, head, tmp_path / "model")
    return str(tmp_path / "model")


def scores(model: str, folder: Path, *words: str) -> tuple[str, float]:
    """The row's name and its figure: all sets are the same here."""
    evaluate.main([model, "--data", "anywhere", "--json", str(folder / "figures.json"), *words])
    ((name, row),) = json.loads((folder / "figures.json").read_text(encoding="utf-8"))["scores"].items()
    assert {row[task] for task in (*STS_TASKS, *DEV_TASKS)} == {row["STS12"]}
    return name, row["STS12"]


@pytest.mark.parametrize("denoise", [False, True])
def test_the_vectors_of_equation_3_are_scored(model: str, tmp_path: Path, denoise: bool) -> None:
    words = MaskedWords.load(model, denoising=denoise)
    name, figure = scores(model, tmp_path, "--top-k", "20", *(["--denoise"] if denoise else []))
    assert name == "torch fp32, top 20 tokens"
    assert figure == round(spearman(lambda texts: words.embed(texts, 20), PAIRS), 2)
    others = [spearman(words.encoder.embed, PAIRS), spearman(lambda texts: words.embed(texts, 3), PAIRS)]
    assert figure not in [round(other, 2) for other in others]


def test_denoising_alone_reads_the_mask_less_the_templates_bias(model: str, tmp_path: Path) -> None:
    (_, denoised), (_, plain) = scores(model, tmp_path, "--denoise"), scores(model, tmp_path)
    assert denoised == round(spearman(SentenceEncoder.load(model, denoising=True).embed, PAIRS), 2)
    assert plain == round(spearman(SentenceEncoder.load(model).embed, PAIRS), 2)
    assert denoised != plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{bert}", "--top-k", "5", "--template", "[X] [MASK]"], "has no masked-word head"),
        (["{model}", "--top-k", "100000"], "--top-k is 100000; write 1 to"),
        (["{model}", "--top-k", "5", "--pooling", "cls"], "leave out --pooling cls"),
        (["{bundle}", "--top-k", "5"], "its configuration is fixed; leave out --top-k"),
        (
            ["{maskless}", "--template", "[X] [MASK]", "--pooling", "mask"],
            "the tokenizer has no mask token; choose cls",
        ),
        (["{bert}"], "has no embedding configuration of its own; give --template and --pooling"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    model: str, tiny_bert: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "embedding.json").write_text("{}", encoding="utf-8")
    maskless = shutil.copytree(tiny_bert, tmp_path / "maskless")
    names = json.loads((maskless / "tokenizer_config.json").read_text(encoding="utf-8"))
    del names["mask_token"]
    (maskless / "tokenizer_config.json").write_text(
        json.dumps(names | {"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    folders = {"model": model, "bert": tiny_bert, "bundle": tmp_path / "bundle", "maskless": maskless}
    arguments = [word.format(**folders) for word in words]
    capsys.readouterr()
    assert run_command(lambda: evaluate.main([*arguments, "--data", "anywhere"])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
