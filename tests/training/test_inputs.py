"""The digests that tell whether a resumed run reads what it began with."""

import shutil
from pathlib import Path

import pytest
from recipes import load_recipe
from tiny_bundle import write_bundle

from cloze.encoding.bundle import Bundle, changing
from cloze.encoding.heads import HEAD_FOLDER
from cloze.training.inputs import digests_of


def digest(folder: Path) -> str:
    recipe = load_recipe("simcse", {"encoder": str(folder), "corpus": ["a.txt"]})
    return digests_of(recipe)[f"encoder {folder}"]


def test_what_is_put_beside_a_model_does_not_change_it(tmp_path: Path) -> None:
    """`cloze head`, `calibrate` and `evaluate --card` write into the bundle; a run of it can be resumed."""
    folder = write_bundle(tmp_path / "tiny")
    before = digest(folder)
    with changing(Bundle.load(folder)) as copied:
        (copied / HEAD_FOLDER).mkdir(exist_ok=True)
        (copied / HEAD_FOLDER / "kind.json").write_text("{}")
        (copied / "README.md").write_text("# Another card")
    (folder / ".cache").write_text("")
    assert digest(folder) == before


@pytest.mark.parametrize("options", [{"seed": 9}, {"template": "[X] is [MASK]."}, {"max_tokens": 20}])
def test_another_model_has_another_digest(tmp_path: Path, options: dict[str, object]) -> None:
    folder = write_bundle(tmp_path / "tiny")
    before = digest(folder)
    shutil.rmtree(folder)
    write_bundle(folder, **options)  # type: ignore[arg-type]
    assert digest(folder) != before
