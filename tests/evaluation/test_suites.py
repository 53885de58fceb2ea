"""The registry, own data in every format, the cache of finished tasks, and errors that name file and line."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from numpy.typing import NDArray
from pyarrow import parquet
from suite_data import embed, numbers, text

from cloze.encoding.errors import ClozeError, OptionError
from cloze.training.errors import CorpusError, RunError, ServerError
from cloze.training.evaluate import main as evaluate
from cloze.training.evaluation.measures import Pairs
from cloze.training.evaluation.options import NAMES, OWN
from cloze.training.evaluation.suites import SUITES, load_suites
from cloze.training.evaluation.suites.cost import PASSES, CostTask
from cloze.training.evaluation.suites.own import DuplicateTask, LabelTask, ScoredPairsTask, TripletTask
from cloze.training.evaluation.suites.space import SpaceTask
from cloze.training.evaluation.suites.sts import StsTask
from cloze.training.evaluation.task import Score, ScoreCache, Subject, score_tasks

Rows = list[dict[str, object]]


@pytest.mark.parametrize(("suite", "name"), [("sts", "STS16"), ("sts", "cost of living"), ("retrieval", "labels")])
def test_a_name_of_cloze_is_refused_for_own_sets(tmp_path: Path, suite: str, name: str) -> None:
    """On the card its figures would pass for others."""
    (tmp_path / name).mkdir()
    with pytest.raises(RunError, match=f"'{name}' is the name of one of Cloze's own sets or suites; rename the folder"):
        load_suites(None, own={suite: [tmp_path / name]})


def write_csv(path: Path, rows: Rows, separator: str = ",") -> None:
    lines = [separator.join(rows[0]), *(separator.join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_tsv(path: Path, rows: Rows) -> None:
    write_csv(path, rows, "\t")


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path: Path, rows: Rows) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


FORMATS = {"csv": write_csv, "tsv": write_tsv, "jsonl": write_jsonl, "parquet": write_parquet}
EAST, NORTH, NORTH_EAST = text(1, 0), text(0, 1), text(1, 1)


@pytest.fixture
def own(tmp_path: Path) -> Callable[[Rows], Path]:
    """Writes rows to a file."""

    def write(rows: Rows) -> Path:
        write_csv(tmp_path / "mine.csv", rows)
        return tmp_path / "mine.csv"

    return write


@pytest.mark.parametrize("ending", FORMATS)
def test_scored_pairs(ending: str, tmp_path: Path) -> None:
    rows: Rows = [{"sentence1": EAST, "sentence2": other, "score": gold} for other, gold in ((EAST, 5.0), (NORTH, 1.0))]
    FORMATS[ending](tmp_path / f"mine.{ending}", rows)
    (task,) = load_suites(None, own={"pairs": [tmp_path / f"mine.{ending}"]})
    assert task == ScoredPairsTask("mine", Pairs([EAST, EAST], [EAST, NORTH], [5.0, 1.0]))
    assert [(score.metric, score.value) for score in task.run(numbers())] == [
        ("spearman", pytest.approx(100)),
        ("pearson", pytest.approx(100)),
    ]


def test_duplicate_pairs(own: Callable[[Rows], Path]) -> None:
    golds = ((EAST, 1), (NORTH, 0), (NORTH_EAST, 1), (text(1, 0.5), 0))
    (task,) = load_suites(
        None, own={"pairs": [own([{"sentence1": EAST, "sentence2": other, "label": gold} for other, gold in golds])]}
    )
    assert isinstance(task, DuplicateTask)
    precision, f1, threshold = task.run(numbers())
    assert (precision.metric, f1.metric, threshold.metric) == ("average precision", "best F1", "its threshold")
    assert precision.value == pytest.approx(100 * (1 / 2 + 2 / 3 / 2))  # the positives are first and third
    assert f1.value == pytest.approx(80)
    assert threshold.value == pytest.approx(0.5**0.5)
    assert f1.counts == {"pairs": 4, "duplicates": 2}


def test_a_text_is_embedded_once_for_all_suites_but_not_where_time_is_measured() -> None:
    asked: list[str] = []

    def counted(texts: Sequence[str]) -> np.ndarray:
        asked.extend(texts)
        return embed(texts)

    pairs = Pairs([text(1, 0), text(0, 1), text(1, 1)], [text(1, 0), text(1, 2), text(0, 3)], [5.0, 4.5, 1.0])
    subject = Subject.of("counted", counted)
    tasks = [StsTask("a", {"a": pairs}), StsTask("b", {"b": pairs}), SpaceTask("c", pairs)]
    together = score_tasks(subject, tasks)
    assert sorted(asked) == sorted({*pairs.left, *pairs.right})
    plain = Subject.of("plain", embed)
    assert together == [replace(score, data=task.digest[:16]) for task in tasks for score in task.run(plain)]
    asked.clear()
    score_tasks(subject, [CostTask("d", pairs.left, "a machine")] * 2)
    assert len(asked) == 2 * (3 + 3 * 3)


@pytest.mark.parametrize("names", [("anchor", "positive", "negative"), ("sent0", "sent1", "hard_neg")])
def test_triplets(own: Callable[[Rows], Path], names: Sequence[str]) -> None:
    rows = [(EAST, NORTH_EAST, NORTH), (EAST, NORTH, NORTH_EAST), (EAST, NORTH, NORTH)]
    path = own([dict(zip(names, row, strict=True)) for row in rows])
    (task,) = load_suites(None, own={"triplets": [path]})
    assert task == TripletTask("mine", rows)
    score, margin = task.run(numbers())
    assert score.value == pytest.approx(50)
    assert score.items is not None
    assert score.items.values == [1.0, 0.0, 0.5]
    assert (margin.metric, margin.value) == ("mean margin", pytest.approx(0, abs=1e-6))  # 0.71, -0.71 and 0


def test_two_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    """Figures are kept by name: one would replace the other."""
    files = [tmp_path / part / "test.csv" for part in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text("anchor,positive,negative\na,b,c\nd,e,f\n", encoding="utf-8")
    with pytest.raises(RunError, match="two sets of the suite triplets have the name 'test'; rename one"):
        load_suites(None, own={"triplets": files})


def test_scored_and_duplicate_pairs_of_the_same_rows_are_different_data() -> None:
    """Otherwise a cache would give the figures of one for the other."""
    pairs = Pairs(["a", "b"], ["c", "d"], [0.0, 1.0])
    assert ScoredPairsTask("mine", pairs).digest != DuplicateTask("mine", pairs).digest


def test_labelled_texts(own: Callable[[Rows], Path]) -> None:
    chance = np.random.default_rng(0)
    rows: Rows = [
        {"text": text(*(chance.normal(size=2) / 9 + centre)), "label": name}
        for name, centre in (("east", (1, 0)), ("north", (0, 1)), ("west", (-1, 0)))
        for _ in range(12)
    ]
    (task,) = load_suites(None, own={"labels": [own(rows)]})
    assert isinstance(task, LabelTask)
    found = {score.metric: score.value for score in task.run(numbers())}
    assert found == {"linear accuracy": 100, "kNN accuracy": 100, "V-measure": pytest.approx(100)}
    assert task.run(numbers())[0].counts == {"texts": 36, "labels": 3}


@pytest.mark.parametrize(
    ("suite", "rows", "message"),
    [
        ("pairs", [{"sentence1": "a", "sentence2": "b", "label": 2}], "line 2: label '2' is neither 1 nor 0"),
        ("pairs", [{"sentence1": "a", "sentence2": "b", "label": 1}], "has only the label 1; give pairs with 1 and"),
        ("pairs", [{"sentence1": "a", "text": "b", "label": 1}], r"has no column sentence2 \(it has label, sentence1"),
        ("pairs", [{"sentence1": "a", "sentence2": "b"}], "has no score"),
        ("triplets", [{"anchor": "a", "positive": "", "negative": "b"}], "line 2: positive is empty"),
        ("triplets", [{"anchor": "a", "positive": "b"}], "has no column negative"),
        (
            "labels",
            [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}],
            "the rarest, 'x', has 1 texts; give two",
        ),
    ],
)
def test_own_data_that_cannot_be_used(tmp_path: Path, suite: str, rows: Rows, message: str) -> None:
    write_csv(tmp_path / "mine.csv", rows)
    with pytest.raises(CorpusError, match=rf"mine\.csv.*{message}"):
        load_suites(None, own={suite: [tmp_path / "mine.csv"]})


@pytest.mark.parametrize("suite", ["pairs", "triplets", "labels"])
def test_own_files_that_are_missing_or_empty(tmp_path: Path, suite: str) -> None:
    with pytest.raises(CorpusError, match=r"none\.csv is not a file"):
        load_suites(None, own={suite: [tmp_path / "none.csv"]})
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(CorpusError, match=r"empty\.jsonl has no"):
        load_suites(None, own={suite: [tmp_path / "empty.jsonl"]})


def test_a_folder_in_semevals_format(tmp_path: Path) -> None:
    for part, golds in (("track1.ar-en", ["5", "", "1"]), ("track2.es-es", ["1", "2", "3"])):
        lines = [f"{EAST}\t{other}\textra" for other in (EAST, NORTH_EAST, NORTH)]
        (tmp_path / f"STS.input.{part}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (tmp_path / f"STS.gs.{part}.txt").write_text("\n".join(golds) + "\n", encoding="utf-8")
    tasks = load_suites(None, own={"sts": [tmp_path]})
    names = ["track1.ar-en", "track2.es-es"]
    assert [task.name for task in tasks] == [*(f"{tmp_path.name} {name}" for name in names), tmp_path.name]
    assert [task.run(numbers())[0].value for task in tasks[:2]] == [pytest.approx(100), pytest.approx(-100)]
    assert isinstance(tasks[2], StsTask)
    assert list(tasks[2].parts) == names
    with pytest.raises(CorpusError, match=r"has no STS\.input"):
        load_suites(None, own={"sts": [tmp_path / "nowhere"]})


def test_what_is_scored_is_named() -> None:
    assert tuple(SUITES) == NAMES
    assert set(OWN) < set(SUITES)
    with pytest.raises(RunError, match=r"--suite is 'sst'; it is one of sts, retrieval, .*baselines"):
        load_suites(None, ["sst"])
    with pytest.raises(RunError, match="nothing to score: give --data DIR, or data of your own with --sts"):
        load_suites(None)
    for name in SUITES:
        with pytest.raises(RunError, match=rf"the suite {name} has no data; give --(data DIR|{name} PATH)"):
            load_suites(None, [name])


class Counted:
    """An encoder that counts its calls, and fails after some of them."""

    def __init__(self, limit: int = 1000) -> None:
        self.calls, self.limit = 0, limit

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.calls += 1
        if self.calls > self.limit:
            raise ServerError("the server is gone")
        return embed(texts)


def some_tasks() -> list[ScoredPairsTask]:
    return [
        ScoredPairsTask(name, Pairs([EAST, EAST, EAST], [EAST, NORTH, other], [3.0, 1.0, 2.0]))
        for name, other in (("a", NORTH_EAST), ("b", text(1, 2)))
    ]


def test_a_second_run_reads_the_cache(tmp_path: Path) -> None:
    cache, encoder = ScoreCache(tmp_path), Counted()
    subject = Subject.of("counted", encoder, "digest")
    first = score_tasks(subject, some_tasks(), cache=cache)
    assert encoder.calls == 2
    assert score_tasks(subject, some_tasks(), cache=cache) == first
    assert encoder.calls == 2
    assert score_tasks(subject, some_tasks(), cache=cache, fresh=True) == first
    assert encoder.calls == 4


def test_a_speed_is_always_measured(tmp_path: Path) -> None:
    """The same model may run on another device, or a server on another machine."""
    cache, encoder = ScoreCache.open(tmp_path / "new"), Counted()
    for _ in range(2):
        score_tasks(Subject.of("a", encoder, "digest"), [CostTask("a", ["1 2"], "machine")], cache=cache)
    assert encoder.calls == 2 * (1 + PASSES)


@pytest.mark.parametrize(("peak", "shown"), [(5_000_000, {"peak memory MB": 5.0}), (None, {})])
def test_the_cost_has_the_memory_where_the_system_says_it(
    peak: int | None, shown: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloze.training.evaluation.suites.cost.peak_memory", lambda: peak)
    subject = Subject("a", Counted(), Counted(), "digest", 2_000_000)
    _, *found = CostTask("a", ["1 2"], "machine").run(subject)
    assert {score.metric: score.value for score in found} == {"size MB": 2.0} | shown


def test_a_cache_that_cannot_be_written_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(OptionError, match=r"notes\.txt cannot be written to \(Not a directory\)"):
        ScoreCache.open(tmp_path / "notes.txt")


def test_a_report_that_cannot_be_written_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(OptionError, match=r"notes\.txt/report cannot be written to \(Not a directory\); choose"):
        evaluate(["nowhere", "--pairs", "nowhere.csv", "--report", str(tmp_path / "notes.txt" / "report")])


def test_other_models_and_other_data_are_scored(tmp_path: Path) -> None:
    cache, encoder = ScoreCache(tmp_path), Counted()
    (task, _), other = some_tasks(), some_tasks()[1]
    for subject, task_of in ((Subject.of("a", encoder, "1"), task), (Subject.of("a", encoder, "2"), task)):
        score_tasks(subject, [task_of], cache=cache)
    score_tasks(Subject.of("a", encoder, "1"), [other], cache=cache)
    assert encoder.calls == 3
    assert task.digest != other.digest


def test_finished_tasks_are_kept_when_one_fails(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    with pytest.raises(ClozeError, match="gone"):
        score_tasks(Subject.of("a", Counted(1), "digest"), some_tasks(), cache=cache)
    encoder = Counted()
    found: list[Score] = score_tasks(Subject.of("a", encoder, "digest"), some_tasks(), cache=cache)
    assert encoder.calls == 1
    assert [score.task for score in found] == ["a", "a", "b", "b"]


def test_a_torn_file_of_the_cache_is_scored_again(tmp_path: Path) -> None:
    cache, encoder = ScoreCache(tmp_path), Counted()
    subject = Subject.of("a", encoder, "digest")
    score_tasks(subject, some_tasks(), cache=cache)
    for file, content in zip(sorted(tmp_path.rglob("*.json")), ("[{", '[{"suite": "pairs"}]'), strict=True):
        file.write_text(content)
    score_tasks(subject, some_tasks(), cache=cache)
    assert encoder.calls == 4
