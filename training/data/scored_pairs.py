"""Pairs of sentences with a human score, and how well a model's cosines rank them.

Two formats are read:

- the STS benchmark's own `sts-*.csv`: no header, tab-separated, no quoting, score in column 4, sentences in 5 and 6
- csv, tsv, jsonl or parquet with the columns `sentence1`, `sentence2`, `score`

all but parquet also with `.gz` after the name. Runs of white space become single blanks, as in SentEval.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from training.data.corpus import finite_score, read_lines, read_records
from training.data.similarity import Pairs, cosines_of, rank_correlation
from training.errors import CorpusError
from training.model.pooling import Embed

__all__ = ["Pairs", "cosines_of", "is_benchmark", "load_pairs", "spearman"]

Row: TypeAlias = tuple[str, str, object]
COLUMNS = ("sentence1", "sentence2", "score")


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
            f"{path} has only the score {pairs.gold[0]:g}, which ranks nothing; give pairs with several scores"
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
    return str(record["sentence1"]), str(record["sentence2"]), record["score"]
