"""Several files with weights, and rows on disk: the run as a whole, and what is refused."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_runs import fit, log
from numpy.typing import NDArray
from recipes import load_recipe

from cloze.encoding.errors import ClozeError
from cloze.training.data.corpus import Corpus, read_corpus
from cloze.training.data.stored_rows import ChosenRows
from cloze.training.errors import CorpusError
from cloze.training.loop.prepare import prepare
from cloze.training.methods.simcse import SimCSE
from cloze.training.run_folder import Run

Words = dict[str, list[str]]


@pytest.fixture
def words(tiny_bert: Path, tmp_path: Path) -> Words:
    """Keys of two epochs of 6 steps over two files, 36 and 12 sentences, with dropout."""
    things = ["dog", "man", "letter", "city", "rain", "guitar"]
    lines = [f"The {a} and the {b} run." for a in things for b in things]
    (tmp_path / "many.txt").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "few.txt").write_text("\n".join(f"Nothing {line}" for line in lines[::3]), encoding="utf-8")
    keys = {"encoder": tiny_bert, "batch_size": 8, "epochs": 2, "log_steps": 1, "save_steps": 2, "held_out": 0}
    files = [str(tmp_path / "many.txt"), str(tmp_path / "few.txt")]
    return {key: [str(value)] for key, value in keys.items()} | {"corpus": files}


@pytest.mark.long
def test_a_run_reads_each_file_as_often_as_its_weight_says(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    views = SimCSE.views

    def listen(self: SimCSE, rows: list[tuple[str, ...]]) -> Any:
        seen.extend(text for (text,) in rows)
        return views(self, rows)

    monkeypatch.setattr(SimCSE, "views", listen)
    fit(load_recipe("simcse", words | {"weights": ["1", "3"]}), Run(tmp_path / "run"))
    assert [Counter(text.startswith("Nothing") for text in seen[at : at + 48]) for at in (0, 48)] == [
        {True: 36, False: 12}
    ] * 2
    assert seen[:48] != seen[48:96]


@dataclass
class InMemory(Corpus):
    numbers: NDArray[np.int64] | None = None  # of the files of all rows

    def files(self) -> NDArray[np.int64]:
        assert self.numbers is not None
        assert isinstance(self.rows, ChosenRows)
        return self.numbers[self.rows.places]


@pytest.mark.parametrize("order", [{}, {"weights": ["2", "1"]}, {"group_by_length": ["true"]}])
def test_rows_on_disk_train_as_rows_in_memory_do(
    order: Words, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("simcse", words | order | {"sentences": ["44"], "held_out": ["8"], "max_steps": ["5"]})
    fit(recipe, Run(tmp_path / "disk"))

    def read_into_memory(*arguments: Any) -> Corpus:
        corpus = read_corpus(*arguments)
        return InMemory(**vars(corpus) | {"rows": list(corpus.rows), "numbers": corpus.files()})

    monkeypatch.setattr("cloze.training.loop.prepare.read_corpus", read_into_memory)
    fit(recipe, Run(tmp_path / "memory"))
    assert log(tmp_path / "disk") == log(tmp_path / "memory")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": ["1"]}, "weights has 1 numbers, but corpus has 2 files; write one number for each file"),
        ({"weights": ["0", "0"]}, "weights are all 0, so no file is drawn from; write one above 0"),
        (
            {"weights": ["1", "2"], "corpus": ["a.txt", "b*.txt"]},
            r"corpus has the pattern b\*\.txt; name each of its files",
        ),
        ({"weights": ["1", "2"], "group_by_length": ["true"]}, "weights and group_by_length order the corpus in two"),
    ],
)
def test_bad_weights_are_refused(changed: Words, message: str, words: Words) -> None:
    with pytest.raises(ClozeError, match=message):
        load_recipe("simcse", words | changed)


def test_a_weight_of_a_file_without_a_sentence_left_is_refused(words: Words) -> None:
    recipe = load_recipe("simcse", words | {"weights": ["1", "2"], "max_words": ["6"]})  # the others have seven words
    with pytest.raises(CorpusError, match=r"few\.txt has the weight 2 and no sentence left to train on .*write 0"):
        prepare(recipe)
