"""Figures worked by hand, and that each one is the measure of its items."""

import numpy as np
import pytest
from suite_data import numbers, text

from cloze.training.errors import EncoderError
from cloze.training.evaluation.measures import Pairs, alignment, mean_interval, rank_correlation, uniformity, units
from cloze.training.evaluation.suites.neighbours import NeighbourTask
from cloze.training.evaluation.suites.space import SpaceTask, anisotropy, cosines_by_gold
from cloze.training.evaluation.suites.sts import StsTask
from cloze.training.evaluation.task import MEASURES, Items, Score, best_f1, measured

SQUARE = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])


def pairs(cosines: list[float], gold: list[float]) -> Pairs:
    """Pairs of texts whose vectors have these cosines."""
    return Pairs([text(1, 0)] * len(gold), [text(cosine, (1 - cosine**2) ** 0.5) for cosine in cosines], gold)


def figures(task: StsTask | NeighbourTask | SpaceTask) -> dict[str, float]:
    return {score.metric: score.value for score in task.run(numbers())}


def test_vectors_that_are_not_finite_are_refused() -> None:
    with pytest.raises(EncoderError, match="the vectors are not finite"):
        units(np.array([[1.0, np.nan]]))


def test_all_mean_and_weighted_mean_differ() -> None:
    parts = {"a": pairs([0.3, 0.2, 0.1], [1, 2, 3]), "b": pairs([0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4])}
    found = figures(StsTask("set", parts))
    assert found["spearman"] == pytest.approx(39.6226, abs=1e-4)
    assert found["mean spearman"] == pytest.approx(0)
    assert found["weighted mean spearman"] == pytest.approx(14.2857, abs=1e-4)
    assert found["weighted mean pearson"] == pytest.approx(14.2857, abs=1e-4)  # these parts are linear


def test_joined_parts_can_disagree_with_both() -> None:
    parts = {"a": pairs([0.7, 0.8, 0.9], [1, 2, 3]), "b": pairs([0.1, 0.2, 0.3, 0.4], [3.5, 4, 4.5, 5])}
    found = figures(StsTask("set", parts))
    assert found["spearman"] == pytest.approx(-50)
    assert found["mean spearman"] == found["weighted mean spearman"] == pytest.approx(100)


def test_ties_share_a_rank_and_pearson_is_linear() -> None:
    found = figures(StsTask("set", {"set": pairs([0.1, 0.2, 0.3], [0, 0, 5])}))
    assert found["spearman"] == pytest.approx(86.60254)
    assert found["pearson"] == pytest.approx(100 * np.corrcoef([0.1, 0.2, 0.3], [0, 0, 5])[0, 1])
    assert list(found) == ["spearman", "pearson"]  # one part has no mean
    assert MEASURES["pearson"](np.ones(3), np.arange(3)) == 0


def test_uniformity_by_hand() -> None:
    assert uniformity(SQUARE) == pytest.approx(-4.396349, abs=1e-6)
    assert uniformity(3 * SQUARE) == pytest.approx(-4.396349, abs=1e-6)
    assert uniformity(np.eye(5)) == pytest.approx(-4)
    assert uniformity(np.array([[1, 0], [-1, 0]])) == pytest.approx(-8)
    assert uniformity(np.ones((3, 2))) == pytest.approx(0)


def test_alignment_and_anisotropy_by_hand() -> None:
    left = np.array([[1.0, 0], [1, 0], [2, 0]])
    np.testing.assert_allclose(alignment(left, np.array([[5.0, 0], [0, 1], [-1, 0]])), [0, 2, 4], atol=1e-12)
    assert anisotropy(np.eye(6)) == pytest.approx(0)
    assert anisotropy(np.ones((4, 3))) == pytest.approx(1)
    vectors = np.random.default_rng(0).normal(size=(7, 3))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    naive = np.mean([unit[i] @ unit[j] for i in range(7) for j in range(7) if i != j])
    assert anisotropy(vectors) == pytest.approx(naive)


def test_space_takes_the_positives_above_the_threshold() -> None:
    task = SpaceTask("set", pairs([1.0, 0.0, -1.0], [5.0, 4.0, 4.5]), threshold=4.0)
    scores = {score.metric: score for score in task.run(numbers())}
    assert list(scores) == ["alignment", "uniformity", "anisotropy"]
    assert scores["alignment"].value == pytest.approx(2)  # of the distances 0 and 4
    assert scores["alignment"].counts == {"positives": 2}
    assert scores["uniformity"].counts == {"vectors": 3}


def test_cosines_are_counted_by_gold_score() -> None:
    found = cosines_by_gold(np.array([-1.0, 0.5, 0.9, 1.0000001]), [0.0, 4.0, 5.0, 4.2])
    assert [each["pairs"] for each in found["bins"]] == [1, 0, 0, 0, 3]
    assert found["bins"][4]["mean"] == pytest.approx(0.8)
    assert found["bins"][0]["histogram"][0] == 1
    assert sum(found["bins"][4]["histogram"]) == 3
    assert len(found["edges"]) == 1 + len(found["bins"][0]["histogram"])


def test_recall_asks_in_both_directions() -> None:
    """Two positive pairs give four queries. East finds its pair first, north finds north west's pair in between."""
    east, almost_east, north, north_west = text(1, 0), text(1, 0.1), text(0, 1), text(-1, 1)
    west = text(-1, 0.9)
    task = NeighbourTask(
        "set", Pairs([east, north, west], [almost_east, north_west, text(0, -1)], [5.0, 5.0, 1.0]), (1, 2)
    )
    scores = {score.metric: score for score in task.run(numbers())}
    assert scores["recall@1"].counts == {"sentences": 6, "queries": 4}
    assert scores["recall@1"].items == Items("mean", [1.0, 0.5], [])  # of the two pairs
    assert scores["recall@1"].value == 75
    assert scores["recall@2"].value == 100
    first = scores["recall@1"].details["examples"][0]
    assert (first["query"], first["positive"]) == (east, almost_east)
    assert first["neighbours"][0] == [almost_east, pytest.approx(1 / 1.01**0.5, abs=1e-4)]


def test_an_identical_sentence_counts_apart() -> None:
    task = NeighbourTask("set", Pairs([text(1, 0), text(1, 0.1)], [text(1, 0.1), text(0, 1)], [5.0, 0.0]), (1,))
    found = figures(task)
    # The first query finds its sentence, at another place. The second one finds the copy of itself.
    assert found == {"recall@1": 50, "recall@1 by place": 0}


def test_the_best_f1_is_that_of_every_threshold() -> None:
    values, gold = np.array([0.9, 0.8, 0.7, 0.2]), np.array([1.0, 0.0, 1.0, 0.0])
    f1, threshold = best_f1(values, gold)
    assert (f1, threshold) == (pytest.approx(0.8), 0.7)
    naive = [2 * (found := (values >= t)) @ gold / (found.sum() + gold.sum()) for t in values]
    assert f1 == pytest.approx(max(naive))


@pytest.mark.parametrize("measure", sorted(MEASURES))
def test_a_figure_is_the_measure_of_its_items_and_survives_json(measure: str) -> None:
    values, gold = [0.5, 0.25, 0.75, 1.0], [1.0, 0.0, 1.0, 1.0]
    score = measured("suite", "task", "metric", measure, values, gold, counts={"pairs": 4}, details={"a": [1]})
    assert score.items is not None
    assert score.value == MEASURES[measure](np.array(score.items.values), np.array(score.items.gold))
    assert Score.from_json(score.as_json()) == score


def test_the_interval_of_equal_values_is_a_point_and_of_others_that_of_the_mean() -> None:
    assert mean_interval(np.full(30, 0.75)) == (0.75, 0.75)
    half = 1.96 * 0.5 / 200**0.5  # of a binomial
    assert mean_interval(np.array([0.0, 1.0] * 100)) == pytest.approx((0.5 - half, 0.5 + half), abs=0.02)


def test_spearman_is_the_rank_correlation() -> None:
    values, gold = np.array([0.5, 0.25, 0.75]), np.array([2.0, 1.0, 0.0])
    assert MEASURES["spearman"](values, gold) == rank_correlation(values, gold)
