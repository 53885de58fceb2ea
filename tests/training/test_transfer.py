"""SentEval's classifier against a plain one, its protocols on data that is known, and the counts of the sets."""

from pathlib import Path

import numpy as np
import pytest
import torch
from suite_data import numbers, text
from torch import nn

from training.data.transfer_sets import COUNTS, Labelled, TransferSet, load_transfer
from training.errors import CorpusError
from training.evaluate import senteval_classifier as classifier
from training.evaluate.senteval_classifier import Rows, fit, fold_protocol, nested_protocol, split_protocol
from training.evaluate.suites.transfer import FastTransferTask, TransferTask, features

DATA = Path(__file__).parents[3] / "shared" / "data"


def rows(count: int, seed: int = 0, noise: float = 0.5) -> Rows:
    """Two classes on either side of a line, some on the wrong one."""
    chance = np.random.default_rng(seed)
    vectors = chance.normal(size=(count, 3))
    classes = (vectors[:, 0] + noise * chance.normal(size=count) > 0).astype(int)
    return Rows.of(vectors, classes.tolist())


def plain(train: Rows, dev: Rows, penalty: float) -> nn.Linear:
    """SentEval's loop, one penalty and one classifier."""
    random = np.random.RandomState(classifier.SEED)
    torch.manual_seed(classifier.SEED)
    model = nn.Linear(train.features.shape[1], 2)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=penalty)
    best, kept, misses, epochs = -1.0, {}, 0, 0
    while True:
        for _ in range(classifier.ROUND):
            order = torch.from_numpy(random.permutation(len(train)))
            for start in range(0, len(train), classifier.BATCH):
                batch = order[start : start + classifier.BATCH]
                loss = nn.functional.cross_entropy(model(train.features[batch]), train.classes[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        epochs += classifier.ROUND
        accuracy = (model(dev.features).argmax(1) == dev.classes).double().mean().item()
        stop = False
        if accuracy > best:
            best, kept = accuracy, {name: value.clone() for name, value in model.state_dict().items()}
        else:
            stop = misses >= classifier.PATIENCE
            misses += 1
        if stop or epochs > classifier.MOST_EPOCHS:
            model.load_state_dict(kept)
            return model


def test_classifiers_side_by_side_are_those_apart() -> None:
    train, dev = rows(150), rows(60, seed=1)
    found = fit(train, dev, 2, classifier.PENALTIES)
    for place, penalty in enumerate(classifier.PENALTIES):
        model = plain(train, dev, penalty)
        torch.testing.assert_close(found.weight[place].T, model.weight.detach(), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(found.bias[place, 0], model.bias.detach(), atol=1e-4, rtol=1e-3)


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
        ("subj_subjective", ["x"] * 20, r"subj\.subjective has 20 rows, SentEval's has 5000"),
        ("TREC_10_label", ["no class"] * 500, r"TREC_10\.label, row 1 is not a row of this set"),
        ("sentiment_dev", ["text\tgood"] * 872, r"sentiment-dev, row 1 is not a row"),
    ],
)
def test_altered_sets_are_refused(tmp_path: Path, name: str, content: list[str], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        load_transfer(write(tmp_path, **{name: content}))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "CR" / "custrev.neg").unlink()
    with pytest.raises(CorpusError, match=r"custrev\.neg is missing"):
        load_transfer(tmp_path)


@pytest.mark.skipif(not (DATA / "senteval").is_dir(), reason="SentEval's data is not beside the project")
def test_the_published_sets_have_their_counts() -> None:
    sets = load_transfer(DATA)
    sizes = [len(each.train) for each in sets.values()]
    assert sizes == [10662, 3775, 10000, 10606, 67349, 5452, 4076]
    assert [len(each.test) for each in sets.values() if each.test] == [1821, 500, 1725]
    assert set(sets["TREC"].train.labels) == set(range(6))
