"""SentEval's classifier against a plain one, its protocols on data that is known, and the counts of the sets."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from data_folder import DATA
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold
from suite_data import numbers, text
from torch import nn

from cloze.training.errors import CorpusError
from cloze.training.evaluation.suites import senteval as classifier
from cloze.training.evaluation.suites.senteval import (
    PENALTIES,
    Problem,
    Rows,
    fit,
    fold_protocol,
    nested_protocol,
    split_protocol,
)
from cloze.training.evaluation.suites.transfer import (
    COUNTS,
    FastTransferTask,
    Labelled,
    TransferSet,
    TransferTask,
    features,
    load_transfer,
)


def rows(count: int, seed: int = 0, classes: int = 2) -> Rows:
    """Classes on either side of lines, some rows on the wrong one."""
    chance = np.random.default_rng(seed)
    vectors = chance.normal(size=(count, 3))
    places = np.searchsorted([0, 1][: classes - 1], vectors[:, 0] + 0.5 * chance.normal(size=count))
    return Rows.of(vectors, places.tolist())


def plain(
    train: Rows, dev: Rows, penalty: float, random: np.random.RandomState | None = None
) -> tuple[nn.Linear, float]:
    """SentEval's loop, one penalty and one classifier; the accuracy is that on the development rows."""
    random = random or np.random.RandomState(classifier.SEED)
    torch.manual_seed(classifier.SEED)
    model = nn.Linear(train.features.shape[1] - 1, int(train.classes.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=penalty)
    best, kept, misses, epochs = -1.0, {}, 0, 0
    while True:
        for _ in range(classifier.ROUND):
            order = torch.from_numpy(random.permutation(len(train)))
            for start in range(0, len(train), classifier.BATCH):
                batch = order[start : start + classifier.BATCH]
                logits = model(train.features[batch, :-1])
                loss = nn.functional.cross_entropy(logits, train.classes[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        epochs += classifier.ROUND
        accuracy = right(model, dev).mean()
        stop = False
        if accuracy > best:
            best, kept = accuracy, {name: value.clone() for name, value in model.state_dict().items()}
        else:
            stop = misses >= classifier.PATIENCE
            misses += 1
        if stop or epochs > classifier.MOST_EPOCHS:
            model.load_state_dict(kept)
            return model, best


def right(model: nn.Linear, rows: Rows) -> NDArray[np.bool_]:
    with torch.no_grad():
        found: NDArray[np.bool_] = (model(rows.features[:, :-1]).argmax(1) == rows.classes).numpy()
    return found


def plain_penalized(rows: Rows) -> nn.Linear:
    """SentEval's choice of a penalty by folds, and its last fit."""
    folds = StratifiedKFold(classifier.FOLDS, shuffle=True, random_state=classifier.SEED)
    splits = list(folds.split(np.zeros(len(rows)), rows.classes))
    means = [np.mean([plain(rows[train], rows[dev], each)[1] for train, dev in splits]) for each in PENALTIES]
    random = np.random.RandomState(classifier.SEED)
    order, held_out = random.permutation(len(rows)), int(classifier.HELD_OUT * len(rows))
    penalty = PENALTIES[int(np.argmax([round(100 * mean, 2) for mean in means]))]
    return plain(rows[order[held_out:]], rows[order[:held_out]], penalty, random)[0]


def test_classifiers_side_by_side_are_those_apart() -> None:
    """Two problems draw the same orders, one has fewer rows, one stops later; rounding grows with the epochs."""
    data = rows(260)
    parts = ((0, 150, 210), (60, 210, 260), (10, 153, 260))
    problems = [Problem(np.arange(start, end), np.arange(end, last)) for start, end, last in parts]
    for problem, found in zip(problems, fit(data, problems), strict=True):
        for place, penalty in enumerate(PENALTIES):
            model, accuracy = plain(data[problem.train], data[problem.dev], penalty)
            torch.testing.assert_close(found.weight[place, :, :-1], model.weight.detach(), atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(found.weight[place, :, -1], model.bias.detach(), atol=1e-4, rtol=1e-3)
            assert found.accuracy[place].item() == accuracy


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows: smaller batches, so that there are enough steps, and more rows that choose the weights."""
    for name, value in {"FOLDS": 3, "MOST_EPOCHS": 40, "BATCH": 2, "HELD_OUT": 0.3}.items():
        monkeypatch.setattr(classifier, name, value)


@pytest.mark.usefixtures("short")
def test_every_row_is_scored_once_by_both_suites() -> None:
    pairs, test_rows = (Labelled([text(5, 0), text(0, 5)] * (n // 2), [0, 1] * (n // 2)) for n in (30, 20))
    for test, dev, scored in ((None, None, 30), (test_rows, None, 20), (test_rows, pairs, 20)):
        (score,) = TransferTask("set", TransferSet(pairs, test, dev)).run(numbers())
        assert score.counts == {"train": 30, "scored": scored}
        assert score.items is not None
        assert len(score.items.values) == scored
        (fast,) = FastTransferTask("set", TransferSet(pairs, test, dev)).run(numbers())
        assert fast.value == 100
        assert (score.suite, fast.suite) == ("transfer", "transfer-fast")


@pytest.mark.usefixtures("short")
def test_the_protocols_are_sentevals_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets whose folds differ in size, and three classes."""
    monkeypatch.setattr(classifier, "BATCH", 16)
    monkeypatch.setattr(classifier, "MOST_EPOCHS", 12)
    data, test, dev = rows(92, classes=3), rows(50, seed=1, classes=3), rows(40, seed=2, classes=3)
    nested = np.zeros(len(data), dtype=bool)
    for train, outside in StratifiedKFold(3, shuffle=True, random_state=classifier.SEED).split(
        np.zeros(len(data)), data.classes
    ):
        nested[outside] = right(plain_penalized(data[train]), data[outside])
    np.testing.assert_array_equal(nested_protocol(data), nested)
    np.testing.assert_array_equal(fold_protocol(data, test), right(plain_penalized(data), test))
    found = [plain(data, dev, penalty) for penalty in PENALTIES]
    best = int(np.argmax([round(100 * accuracy, 2) for _, accuracy in found]))
    np.testing.assert_array_equal(split_protocol(data, dev, test), right(found[best][0], test))


@pytest.mark.usefixtures("short")
def test_protocols_are_better_than_chance_and_the_same_again() -> None:
    train, test, dev = rows(90), rows(50, seed=1), rows(50, seed=2)
    right = nested_protocol(train)
    assert right.shape == (90,)
    assert right.mean() > 0.7
    np.testing.assert_array_equal(right, nested_protocol(train))
    assert fold_protocol(train, test).mean() > 0.7
    assert split_protocol(train, dev, test).mean() > 0.7


def test_pairs_are_read_by_difference_and_product() -> None:
    found = features(numbers().embed, Labelled([text(1, 2)], [1], [text(3, -1)]))
    np.testing.assert_array_equal(found, [[2, 3, 3, -2]])


def write(folder: Path, **changed: list[str]) -> Path:
    """Files of the right number of rows; `changed` replaces some, by the last part of their path."""
    (folder / "STS").mkdir(parents=True)
    for file, count in COUNTS.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = {
            "SST": lambda row: f"a  film {row}\t{row % 2}",
            "TREC": lambda row: f"NUM:dist How  far {row} ?",
            "MRPC": lambda row: f"{row % 2}\t1\t2\tA man {row}\tA dog",
        }.get(file.split("/")[0], lambda row: f"a caf\xe9 {row}")
        content = changed.get(path.name.replace("-", "_").replace(".", "_"), [lines(row) for row in range(count)])
        header = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"] if file.startswith("MRPC") else []
        encoding = "utf-8" if header or file.startswith("SST") else "latin-1"
        path.write_text("\n".join([*header, *content]) + "\n", encoding=encoding)
    return folder


def test_sets_are_read_in_sentevals_order(tmp_path: Path) -> None:
    long, short, empty = "a much longer sentence", "short", ""
    negative = [long, short, empty, *["b c"] * (5331 - 3)]
    sets = load_transfer(write(tmp_path, rt_polarity_neg=negative))
    assert list(sets) == ["MR", "CR", "SUBJ", "MPQA", "SST-2", "TREC", "MRPC"]
    mr = sets["MR"].train
    assert (mr.texts[0], mr.labels[0]) == (".", 0)  # SentEval embeds a full stop for an empty text
    assert (mr.texts[1], mr.texts[-1]) == ("short", long)
    assert sets["TREC"].train.texts[0] == "How far 0 ?"
    assert sets["TREC"].train.labels[0] == 5
    assert sets["MRPC"].test is not None
    assert sets["MRPC"].test.second[0] == "A dog"
    assert sets["SST-2"].dev is not None
    assert len(sets["SST-2"].dev) == 872


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("subj_subjective", ["x"] * 20, r"subj\.subjective has 20 rows, but SentEval's has 5000"),
        ("TREC_10_label", ["no class"] * 500, r"TREC_10\.label, row 1 is not a row of this set"),
        ("sentiment_dev", ["text\tgood"] * 872, r"sentiment-dev, row 1 is not a row"),
    ],
)
def test_altered_sets_are_refused(tmp_path: Path, name: str, content: list[str], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        load_transfer(write(tmp_path, **{name: content}))


def test_the_rows_of_every_file_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in COUNTS:
        monkeypatch.setitem(COUNTS, file, 12)
    write(tmp_path)
    for file in COUNTS:
        content = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(content.removesuffix(b"\n").rpartition(b"\n")[0] + b"\n")
        with pytest.raises(CorpusError, match=rf"{re.escape(file)} has 11 rows, but SentEval's has 12"):
            load_transfer(tmp_path)
        (tmp_path / file).write_bytes(content)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "CR" / "custrev.neg").unlink()
    with pytest.raises(CorpusError, match=r"custrev\.neg is missing"):
        load_transfer(tmp_path)


@pytest.mark.skipif(not (DATA / "senteval").is_dir(), reason="SentEval's data is missing")
def test_the_published_sets_have_their_counts() -> None:
    sets = load_transfer(DATA)
    sizes = [len(each.train) for each in sets.values()]
    assert sizes == [10662, 3775, 10000, 10606, 67349, 5452, 4076]
    assert [len(each.test) for each in sets.values() if each.test] == [1821, 500, 1725]
    assert set(sets["TREC"].train.labels) == set(range(6))
