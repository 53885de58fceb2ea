"""Dev data of every kind: recognised by its contents, and the same figure in fit as in evaluate."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from killed_runs import fit, fit_until_killed, log
from recipes import load_recipe
from suite_data import embed, numbers, text
from test_retrieval import write as write_collection

from cloze.command import run as run_command
from cloze.training.errors import CorpusError, RecipeError
from cloze.training.evaluation.dev import DevData
from cloze.training.evaluation.suites import load_suites
from cloze.training.fit import main
from cloze.training.recipes.recipe import Recipe, validate
from cloze.training.run_folder import Run

EAST, NORTH, NORTH_EAST = text(1, 0), text(0, 1), text(1, 1)
PAIRS = [(EAST, NORTH_EAST, 1, 4.5), (EAST, NORTH, 0, 0.5), (EAST, text(2, 1), 0, 3.0), (NORTH, text(1, 3), 1, 5.0)]


def scored(folder: Path) -> Path:
    path = folder / "scored.csv"
    path.write_text("sentence1,sentence2,score\n" + "".join(f"{a},{b},{score}\n" for a, b, _, score in PAIRS))
    return path


def benchmark(folder: Path) -> Path:
    path = folder / "sts-dev.csv"
    path.write_text("".join(f"news\tMSR\t2012\t1\t{score}\t{a}\t{b}\n" for a, b, _, score in PAIRS))
    return path


def duplicates(folder: Path) -> Path:
    path = folder / "labelled.jsonl"
    rows = ({"sentence1": a, "sentence2": b, "label": label} for a, b, label, _ in PAIRS)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def triplets(folder: Path) -> Path:
    path = folder / "triplets.tsv"
    rows = [(EAST, NORTH_EAST, NORTH), (EAST, NORTH, NORTH_EAST), (EAST, NORTH, NORTH)]
    path.write_text("anchor\tpositive\tnegative\n" + "".join("\t".join(row) + "\n" for row in rows))
    return path


def collection(folder: Path) -> Path:
    documents = [{"_id": f"d{n}", "text": text(n, 5 - n)} for n in range(5)]
    queries = [{"_id": "q1", "text": text(1, 1)}, {"_id": "q2", "text": NORTH}]
    return write_collection(folder / "compass", "q1\td1\t1\nq2\td0\t2\nq2\td4\t1\n", corpus=documents, queries=queries)


KINDS = [
    (scored, "pairs", "spearman"),
    (benchmark, "pairs", "spearman"),
    (duplicates, "pairs", "average_precision"),
    (triplets, "triplets", "accuracy"),
    (collection, "retrieval", "ndcg"),
]


@pytest.mark.parametrize(("make", "suite", "metric"), KINDS, ids=lambda value: getattr(value, "__name__", None))
def test_the_figure_of_fit_is_that_of_evaluate(
    make: Callable[[Path], Path], suite: str, metric: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    dev = DevData.load([str(path)])
    (task,) = load_suites(None, own={suite: [path]})
    assert dev.chooser("mean") == dev.chooser("least_gain") == metric
    assert dev.score(embed) == {metric: task.run(numbers())[0].value}


def test_several_sets_choose_by_their_mean(tmp_path: Path) -> None:
    dev = DevData.load([str(make(tmp_path)) for make, _, _ in KINDS])
    figures = dev.score(embed)
    names = ["scored_spearman", "sts-dev_spearman", "average_precision", "accuracy", "ndcg"]
    assert list(figures) == [*names, "mean", "least_gain"]
    assert dev.chooser("mean") == "mean"
    assert figures["mean"] == pytest.approx(sum(figures[name] for name in names) / 5)
    with pytest.raises(CorpusError, match="two sets named scored_spearman; rename one of them"):
        DevData.load([str(tmp_path / "scored.csv")] * 2)


def test_the_least_gain_is_over_the_figures_at_the_start(tmp_path: Path) -> None:
    dev = DevData.load([str(make(tmp_path)) for make in (scored, duplicates, triplets)])
    assert dev.chooser("least_gain") == "least_gain"
    before = dev.score(embed)
    assert before["least_gain"] == 0
    lower = before | {"spearman": before["spearman"] - 3, "accuracy": before["accuracy"] + 2}
    assert dev.score(embed, start=lower)["least_gain"] == pytest.approx(-2)
    lower["accuracy"] = before["accuracy"] - 1
    lower["average_precision"] = before["average_precision"] - 4
    assert dev.score(embed, start=lower)["least_gain"] == pytest.approx(1)


def test_a_resumed_run_keeps_the_figures_of_its_start(tiny_bert: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"The dog saw {number} cats.\n" for number in range(64)))
    pairs = "sentence1,sentence2,score\nTwo dogs run.,A dog runs.,4.5\nRain.,A city.,1.0\nRain.,The guitar.,0.5\n"
    (tmp_path / "dev.csv").write_text(pairs)
    (tmp_path / "other.csv").write_text(pairs.replace("4.5", "0.1"))
    keys = {"encoder": tiny_bert, "corpus": tmp_path / "text.txt", "dev_choice": "least_gain", "batch_size": 8}
    keys |= {"max_steps": 6, "eval_steps": 2, "log_steps": 1, "learning_rate": 1e-3}
    words = {key: [str(value)] for key, value in keys.items()}
    words["dev"] = [str(tmp_path / name) for name in ("dev.csv", "other.csv")]
    recipe, run = load_recipe("simcse", words), Run(tmp_path / "run")
    fit_until_killed(recipe, run, step=5)
    fit(recipe, run, resume=True)
    start, *others = [entry for entry in log(run.path) if "eval_dev_mean" in entry]
    names = ("eval_dev_dev_spearman", "eval_dev_other_spearman")
    assert [entry["step"] for entry in others] == [2, 4, 6]
    for entry in others:
        assert entry["eval_dev_least_gain"] == pytest.approx(min(entry[name] - start[name] for name in names))
    assert run.provenance()["dev_score"] == max(entry["eval_dev_least_gain"] for entry in others)
    assert run.provenance()["chosen_by"] == "dev_least_gain"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "mine.csv",
            "first,second,same\na,b,1\n",
            r"mine\.csv has the columns first, same, second; dev takes sentence1, .*label; .*folder",
        ),
        ("mine.csv", "sentence1,sentence2\na,b\n", r"has the columns sentence1, sentence2; dev takes"),
        ("mine.csv", "sentence1,sentence2,label\na,b,2\n", r"line 2: label '2' is neither 1 nor 0"),
        ("mine.csv", "sentence1,sentence2,label\na,b,1\nc,d,1\n", "has only the label 1; give pairs with 1 and"),
        ("mine.csv", "sentence1,sentence2,score\na,b,3\n", "has only the score 3, so there is nothing to rank"),
        (
            "mine.csv",
            "anchor,positive,negative\na,b,c\n",
            "has one triplet, so its accuracy can only be 0 or 100; give more",
        ),
        ("mine.csv", "sentence1,sentence2,score\n", "has no rows"),
        ("mine.txt", "a\n", r"has no columns; give a \.csv"),
        ("folder/notes.txt", "", r"folder/corpus\.jsonl is missing; give a BEIR folder"),
    ],
)
def test_dev_data_that_cannot_be_used(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(CorpusError, match=message):
        DevData.load([str(path.parent if path.parent != tmp_path else path)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"none\.csv is not a file or folder; dev takes a file with the columns"):
        DevData.load([str(tmp_path / "none.csv")])


def test_the_former_key_names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"method": "simcse", "encoder": "e", "corpus": ["c.txt"], "dev_retrieval": ["med"]}
    with pytest.raises(RecipeError, match="recipe mine: dev_retrieval is now part of dev; write its values there"):
        validate(Recipe, keys, "mine")
    for words in (["--dev-retrieval", "med"], ["--dev-retrieval=med"]):
        assert run_command(lambda words=words: main(["simcse", "--corpus", "c.txt", *words])) == 2
        assert "--dev-retrieval is now part of --dev; write its values there" in capsys.readouterr().err


def test_own_pairs_and_a_collection_choose_a_checkpoint(tmp_path: Path, tiny_bert: Path) -> None:
    words = ["dog", "man", "letter", "city", "rain"]
    corpus, pairs = tmp_path / "text.txt", tmp_path / "mine.csv"
    corpus.write_text("".join(f"The {a} and the {b} run.\n" for a in words for b in words))
    rows = "".join(f"The {a} and the {b} run.,A {a}.,{int(a < b)}\n" for a in words for b in words)
    pairs.write_text(f"sentence1,sentence2,label\n{rows}")
    options = {"encoder": tiny_bert, "corpus": corpus, "batch_size": 8, "max_steps": 6, "eval_steps": 2}
    flags = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    dev = [str(pairs), str(write_collection(tmp_path / "compass"))]
    run = Run(tmp_path / "run")
    assert main(["simcse", *flags, "--learning-rate", "1e-3", "--dev", *dev, "--out", str(run.path)]) == 0
    log = [json.loads(line) for line in run.log_file.read_text().splitlines()]
    means = {entry["step"]: entry["eval_dev_mean"] for entry in log if "eval_dev_mean" in entry}
    found = run.provenance()
    assert sorted(means) == [0, 2, 4, 6]
    assert found["chosen_by"] == "dev_mean"
    assert found["dev_score"] == means[found["best_step"]] == max(means.values())
    assert found["held_out"] == 0
    assert load_recipe(str(run.recipe_file)).dev == tuple(dev)
