"""Heads of a bundle: closed forms of their probabilities, and files that are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloze.encoding.errors import BundleError
from cloze.encoding.heads import ClassifierHead

MADE: dict[str, Any] = {
    "labels": ["a", "b"], "several": False, "weights": [[1, 0], [0, 2]], "biases": [0, 0.5], "threshold": None,
    "texts": 16, "source": "x.csv", "figures": {},
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "topic.json"
    file.write_text(json.dumps(MADE | changes))
    return file


def test_scores_and_probabilities_have_their_closed_forms(tmp_path: Path) -> None:
    head = ClassifierHead.read(written(tmp_path), 2)
    scores = head.scores(np.array([[1.0, 0.0], [0.6, 0.8]]))
    np.testing.assert_allclose(scores, [[1, 0.5], [0.6, 2.1]])
    odds = np.exp([-0.5, 1.5])
    np.testing.assert_allclose(head.probabilities(scores), np.stack([1 / (1 + odds), odds / (1 + odds)], axis=1))
    several = ClassifierHead.read(written(tmp_path, several=True), 2)
    np.testing.assert_allclose(several.probabilities(scores), 1 / (1 + np.exp(-scores)))


def test_large_scores_do_not_overflow(tmp_path: Path) -> None:
    for several in (False, True):
        head = ClassifierHead.read(written(tmp_path, several=several), 2)
        np.testing.assert_allclose(head.probabilities(np.array([[1e4, -1e4]])), [[1, 0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ["a"]}, "a row of weights and a bias for each label"),
        ({"labels": ["a", "a"]}, "a row of weights and a bias for each label"),
        ({"biases": [0]}, "a row of weights and a bias for each label"),
        ({"weights": [[1, 0], [1]]}, "a row of weights and a bias for each label"),
        ({"weights": [[1, 0, 0], [1, 0, 0]]}, "takes 3 dimensions, but the bundle has 2"),
        ({"biases": [0, float("inf")]}, "finite number"),
        ({"unknown": 1}, "Extra inputs"),
    ],
)
def test_a_file_that_is_no_head_is_refused_in_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=message) as caught:
        ClassifierHead.read(written(tmp_path, **changes), 2)
    assert "topic.json" in str(caught.value)
    assert "make it again: `cloze head`" in str(caught.value)
