"""The command as a user runs it: tokens and probabilities, from a folder or a run, and errors in one line."""

from pathlib import Path

import pytest

from cloze.command import run as run_command
from cloze.training.explain import main
from cloze.training.model.encoder import SentenceEncoder
from cloze.training.model.masked_words import MaskedHead, MaskedWords, save_masked_lm

TEMPLATE = '"[X]" means [MASK].'


@pytest.fixture
def model(tiny_bert: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "model"
    encoder = SentenceEncoder.load(str(tiny_bert), template=TEMPLATE, pooling="mask")
    encoder.save(folder)
    save_masked_lm(encoder.backbone, MaskedHead(encoder.backbone.config), folder)
    return folder


def rows(output: str) -> list[tuple[str, str]]:
    cells = [line.strip("│").split("│") for line in output.splitlines() if line.startswith("│")]
    return [(word.strip(), probability.strip()) for word, probability in cells]


@pytest.mark.parametrize("denoise", [False, True])
def test_each_text_has_its_tokens_most_probable_first(
    model: Path, denoise: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["Two dogs run.", "Rain [b]falls[/b] :heart: \\"]
    assert main([*texts, "--encoder", str(model), "--top-k", "4", *(["--denoise"] if denoise else [])]) is None
    output = capsys.readouterr().out
    assert all(text in output for text in texts)
    expected = MaskedWords.load(str(model), denoising=denoise).words(texts, 4)
    assert rows(output) == [(word, f"{p:.4f}") for found in expected for word, p in found]


def test_a_run_is_read_by_its_own_template_unless_another_is_given(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model.parent / "run.json").write_text("{}", encoding="utf-8")

    def explain(*arguments: str) -> list[tuple[str, str]]:
        main(["Two dogs run.", *arguments])
        return rows(capsys.readouterr().out)

    own = explain("--encoder", str(model.parent))
    assert len(own) == 10
    assert own == explain("--encoder", str(model), "--template", TEMPLATE)
    assert own != explain("--encoder", str(model), "--template", "[MASK]: [X]")
    assert explain("--encoder", str(model), "--final-period") == own  # the text has one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--encoder", "{bert}"], "has no template of its own; give one: --template"),
        (["--encoder", "{bert}", "--template", "[X] [MASK]"], "has no masked-word head"),
        (["--encoder", "{model}", "--template", "[X]"], "has [MASK] 0 times"),
        (["--encoder", "{model}", "--top-k", "100000"], "--top-k is 100000; write 1 to"),
        (["--encoder", "{model}/.."], "is not a run"),
        (["--encoder", "cloze-mini"], "is a bundle, which has no masked-word head"),
    ],
)
def test_bad_input_is_one_line(
    model: Path, tiny_bert: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(bert=tiny_bert, model=model) for word in arguments]
    assert run_command(lambda: main(["Two dogs run.", *words])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
