"""--dry-run of every method."""

from pathlib import Path

import pytest
from contrastive_methods import add_masked_head
from recipes import arguments

from cloze.training.fit import main
from cloze.training.recipes.recipe import shipped_recipes

TEXT = [f"The {a} and the {b} run." for a in ("dog", "man", "city", "rain") for b in ("letter", "guitar", "market")]
COLUMNS = ("sent0", "sent1", "hard_neg", "sentence", "translation", "sentence1", "sentence2", "query", "document")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    folder = tmp_path_factory.mktemp("rehearsal")
    add_masked_head(tiny_bert, folder / "bert")
    (folder / "text.txt").write_text("\n".join(TEXT) + "\n", encoding="utf-8")
    head = ",".join([*COLUMNS, "score"])
    rows = [head, *(",".join([*[line] * len(COLUMNS), str(place)]) for place, line in enumerate(TEXT))]
    (folder / "rows.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_rehearses(
    name: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    columns = "columns =" in shipped_recipes()[name]
    keys = {"encoder": "bert", "corpus": "rows.csv" if columns else "text.txt", "batch_size": 4, "max_tokens": 40}
    own = {"distill": {"teacher": "bert"}, "sg": {"head_width": 16, "held_out": 4}}
    own |= {"mask": {"teacher_pooling": "mean", "frozen_layers": 1}}
    keys |= own.get(name.split("-")[0], {})
    if name.startswith("diffcse"):
        keys |= {"generator": "bert"}
    assert main([name, "--dry-run", *arguments(keys)]) == 0
    output = capsys.readouterr().err
    assert "tokens, such as: [CLS]" in output
    if name.startswith("diffcse"):
        assert "drawn first, edited: (4, " in output
        assert "drawn second, edited: (4, " in output
    else:
        assert "drawn" not in output
    assert " sentences per second; " in output
    assert not Path("runs").exists()


def test_masked_words_are_shown(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    keys = ["--encoder", "bert", "--corpus", "text.txt", "--batch-size", "4", "--mlm-weight", "0.1"]
    assert main(["simcse", *keys, "--masked-share", "0.9", "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("drawn first, masked: (4, ")]
    assert "[MASK]" in line
