"""The STS sets in SentEval's layout, folders in SemEval's format, and files of scored pairs.

Every file is checked against the counts of the papers' tables.

Files of scored pairs have one of two formats:

- the STS benchmark's own `sts-*.csv`: no header, tab-separated, no quoting, score in column 4, sentences in 5 and 6
- csv, tsv, jsonl or parquet with the columns `sentence1`, `sentence2`, `score`

all but parquet also with `.gz` after the name. Runs of white space become single blanks, as in SentEval.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, Final, TypeAlias

from cloze.training.data.corpus import finite_score, read_lines, read_records
from cloze.training.errors import CorpusError
from cloze.training.evaluation.measures import Embed, Pairs, cosines_of, rank_correlation

LAYOUTS: Final = ("senteval/downstream", "downstream", ".")

Row: TypeAlias = tuple[str, str, object]
SENTENCES: Final = ("sentence1", "sentence2")
COLUMNS: Final = (*SENTENCES, "score")

STS_TASKS: Final = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
DEV_TASKS: Final = ("STS-B dev", "SICK-R trial")
COUNTS: Final[dict[str, int]] = {
    "STS12": 3108,
    "STS13": 1500,
    "STS14": 3750,
    "STS15": 3000,
    "STS16": 1186,
    "STS-B": 1379,
    "SICK-R": 4927,
    "STS-B dev": 1500,
    "SICK-R trial": 500,
}
PARTS: Final[dict[str, dict[str, int]]] = {
    "STS12": {"MSRpar": 750, "MSRvid": 750, "SMTeuroparl": 459, "surprise.OnWN": 750, "surprise.SMTnews": 399},
    "STS13": {"FNWN": 189, "headlines": 750, "OnWN": 561},  # SMT has its own licence, and the papers' tables omit it
    "STS14": {
        "deft-forum": 450,
        "deft-news": 300,
        "headlines": 750,
        "images": 750,
        "OnWN": 750,
        "tweet-news": 750,
    },
    "STS15": {"answers-forums": 375, "answers-students": 750, "belief": 375, "headlines": 750, "images": 750},
    "STS16": {
        "answer-answer": 254,
        "headlines": 249,
        "plagiarism": 230,
        "postediting": 244,
        "question-question": 209,
    },
}
FILES: Final[dict[str, str]] = {
    "STS-B": "STS/STSBenchmark/sts-test.csv",
    "STS-B dev": "STS/STSBenchmark/sts-dev.csv",
    "SICK-R": "SICK/SICK_test_annotated.txt",
    "SICK-R trial": "SICK/SICK_trial.txt",
}


def find_downstream(data: str | Path) -> Path:
    """The folder with `STS/` and `SICK/` in it: `data` itself, or below it as `downstream` or `senteval/downstream`.

    Raises CorpusError if there is none.
    """
    for layout in LAYOUTS:
        if (Path(data) / layout / "STS").is_dir():
            return Path(data) / layout
    raise CorpusError(
        f"{data} has no STS folder, nor has senteval/downstream or downstream in it; give SentEval's data folder "
        "(after its get_transfer_data.bash): the folder that holds STS and SICK, or one above it"
    )


def present(path: Path) -> Path:
    """The path of a file of SentEval's data. Raises CorpusError if it is missing."""
    if not path.is_file():
        raise CorpusError(f"{path} is missing; get SentEval's data again (its get_transfer_data.bash)")
    return path


def load_pairs(path: str | Path) -> Pairs:
    """Read a file of scored pairs.

    Raises CorpusError, which names the file and the line, if it is missing, is not UTF-8 or has other columns.
    """
    path = Path(path)
    if not path.is_file():
        raise CorpusError(f"{path} is not a file; give scored pairs, for example STS/STSBenchmark/sts-dev.csv")
    pairs = Pairs([], [], [])
    for number, (left, right, score) in _rows(path):
        pairs.left.append(" ".join(left.split()))
        pairs.right.append(" ".join(right.split()))
        pairs.gold.append(finite_score(score, f"{path}, line {number}"))
    if not pairs:
        raise CorpusError(f"{path} has no pairs; give one with the columns {', '.join(COLUMNS)}")
    if len(set(pairs.gold)) == 1:
        raise CorpusError(
            f"{path} has only the score {pairs.gold[0]:g}, so there is nothing to rank; give pairs with several scores"
        )
    return pairs


def spearman(embed: Embed, pairs: Pairs) -> float:
    """Spearman's correlation x100 of cosine and gold; each distinct sentence is embedded once."""
    return rank_correlation(cosines_of(embed, pairs), pairs.gold)


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Line numbers, counted from 1, and rows."""
    if is_benchmark(path):
        yield from _benchmark_rows(path)
    else:
        for number, record in read_records(path):
            yield number, _columns(record, f"{path}, line {number}")


def is_benchmark(path: Path) -> bool:
    """Whether a file has the STS benchmark's own format. Raises CorpusError if it cannot be read."""
    if path.suffix == ".parquet":
        return False
    cells = next(read_lines(path), "").split("\t")
    return len(cells) >= 7 and cells[4].strip().replace(".", "", 1).isdigit()


def _benchmark_rows(path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(read_lines(path), 1):
        cells = line.split("\t")
        if len(cells) >= 7:
            yield number, (cells[5], cells[6], cells[4])
        elif line.strip():
            raise CorpusError(f"{path}, line {number} has {len(cells)} tab-separated columns; the benchmark has 7")


def _columns(record: dict[str, Any], where: str) -> Row:
    missing = [name for name in COLUMNS if record.get(name) is None]
    if missing:
        raise CorpusError(
            f"{where} has no {', '.join(missing)} (it has {', '.join(map(str, record))}); "
            f"name the columns {', '.join(COLUMNS)}"
        )
    for name in SENTENCES:
        if not isinstance(record[name], str) or not record[name].strip():
            raise CorpusError(f"{where}: {name} is {record[name]!r}; write a text")
    left, right = (record[name] for name in SENTENCES)
    return left, right, record["score"]


def load_tasks(data: str | Path, tasks: Sequence[str] = STS_TASKS) -> dict[str, Pairs]:
    """Read tasks from SentEval's folder (see `find_downstream`), each as one set of pairs.

    Raises CorpusError, which names the file, if one is missing or differs from what was published.
    """
    return {task: sum(parts.values(), Pairs([], [], [])) for task, parts in load_parts(data, tasks).items()}


def load_parts(data: str | Path, tasks: Sequence[str] = STS_TASKS) -> dict[str, dict[str, Pairs]]:
    """Like `load_tasks`, but with the parts of each task separate: task -> part -> pairs."""
    downstream = find_downstream(data)
    return {task: _load(downstream, task) for task in tasks}


def load_semeval(folder: str | Path) -> dict[str, Pairs]:
    """Part -> pairs of a folder in SemEval's format: `STS.input.PART.txt` with `STS.gs.PART.txt`, in any language.

    Raises CorpusError.
    """
    names = sorted(path.name[len("STS.input.") : -len(".txt")] for path in Path(folder).glob("STS.input.*.txt"))
    if not names:
        raise CorpusError(f"{folder} has no STS.input.*.txt; give a folder in SemEval's format, with STS.gs.*.txt")
    parts = {name: _part(Path(folder), name) for name in names}
    for name, pairs in parts.items():
        if len(set(pairs.gold)) < 2:
            raise CorpusError(
                f"{folder}/STS.gs.{name}.txt has fewer than two different scores, so there is nothing to rank; get the "
                "folder again"
            )
    return parts


def average(scores: dict[str, float]) -> float:
    """The papers' last column: the mean of the seven rounded figures, with two decimals."""
    return round(sum(scores[task] for task in STS_TASKS) / len(STS_TASKS), 2)


def _load(downstream: Path, task: str) -> dict[str, Pairs]:
    if task in PARTS:
        folder = downstream / "STS" / f"{task}-en-test"
        parts = {part: _part(folder, part) for part in PARTS[task]}
        for part, count in PARTS[task].items():
            _hold_count(folder / f"STS.gs.{part}.txt", parts[part], f"{part} of {task}", count)
        return parts
    where = downstream / FILES[task]
    present(where)
    pairs = _sick(where) if task.startswith("SICK") else load_pairs(where)
    _hold_count(where, pairs, task, COUNTS[task])
    return {task: pairs}


def _hold_count(path: Path, pairs: Pairs, name: str, count: int) -> None:
    if len(pairs) != count:
        raise CorpusError(
            f"{path} has {len(pairs)} scored pairs, but {name} has {count}, so scores would not be comparable: "
            "get SentEval's data again"
        )


def _part(folder: Path, part: str) -> Pairs:
    """Two tab-separated sentences per line, and their scores in a second file; blank scores mark unused lines."""
    inputs, golds = folder / f"STS.input.{part}.txt", folder / f"STS.gs.{part}.txt"
    present(inputs)
    if not golds.is_file():
        raise CorpusError(f"{golds} is missing; it has the scores of {inputs.name}: get the folder again")
    texts, scores = list(read_lines(inputs)), list(read_lines(golds))
    while scores and not scores[-1].strip() and len(scores) > len(texts):
        scores.pop()
    if len(scores) != len(texts):
        raise CorpusError(
            f"{golds} has {len(scores)} lines, but {inputs} has {len(texts)}; the lines of the two files belong "
            "together: get the folder again"
        )
    pairs = Pairs([], [], [])
    for number, (line, score) in enumerate(zip(texts, scores, strict=True), 1):
        if score.strip():
            cells = line.split("\t")
            _append(pairs, cells[0], cells[1] if len(cells) > 1 else None, score, f"{inputs}, line {number}")
    return pairs


def _sick(path: Path) -> Pairs:
    pairs = Pairs([], [], [])
    for number, line in enumerate(read_lines(path), 1):
        cells = line.split("\t")
        if number > 1 and line.strip():  # the first line may be a header
            cells += [""] * (4 - len(cells))
            _append(pairs, cells[1], cells[2], cells[3], f"{path}, line {number}")
    return pairs


def _append(pairs: Pairs, left: str, right: str | None, score: str, where: str) -> None:
    gold: float | None = None
    with suppress(ValueError):
        gold = float(score)
    if right is None or gold is None or not isfinite(gold):
        raise CorpusError(f"{where} is not two tab-separated sentences with a finite score; get the folder again")
    pairs.left.append(" ".join(left.split()))
    pairs.right.append(" ".join(right.split()))
    pairs.gold.append(gold)
