"""Pairs of sentences with a human score, and how well a model's cosines rank them.

Two formats are read:

- the STS benchmark's own `sts-*.csv`: no header, tab-separated, no quoting, score in column 4, sentences in 5 and 6
- csv, tsv or jsonl with the columns `sentence1`, `sentence2`, `score`

both also with `.gz` after the name. Runs of white space become single blanks, as in SentEval.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from training.data.corpus import read_lines, read_records
from training.errors import CorpusError
from training.model.pooling import Embed

__all__ = ["Pairs", "cosines", "load_pairs", "rank_correlation", "spearman"]

Row: TypeAlias = tuple[str, str, object]
COLUMNS = ("sentence1", "sentence2", "score")


@dataclass(frozen=True)
class Pairs:
    """`left[i]` and `right[i]` are as similar as `gold[i]` says, on any scale that grows with similarity."""

    left: list[str]
    right: list[str]
    gold: list[float]

    def __len__(self) -> int:
        return len(self.gold)

    def __add__(self, other: Self) -> "Pairs":
        return Pairs(self.left + other.left, self.right + other.right, self.gold + other.gold)


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
        pairs.gold.append(_number(score, f"{path}, line {number}"))
    if not pairs:
        raise CorpusError(f"{path} has no pairs; give one with the columns {', '.join(COLUMNS)}")
    if len(set(pairs.gold)) == 1:
        raise CorpusError(
            f"{path} has only the score {pairs.gold[0]:g}, which ranks nothing; give pairs with several scores"
        )
    return pairs


def spearman(embed: Embed, pairs: Pairs) -> float:
    """Spearman's correlation x100 of cosine and gold; each distinct sentence is embedded once."""
    sentences = sorted({*pairs.left, *pairs.right})
    vectors = dict(zip(sentences, embed(sentences), strict=True))
    left, right = (np.stack([vectors[text] for text in side]) for side in (pairs.left, pairs.right))
    return rank_correlation(cosines(left, right), pairs.gold)


def cosines(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.float64]:
    """Two arrays (n, d) -> (n), in float64; 0 if a vector is zero or not finite."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        cosine: NDArray[np.float64] = (left * right).sum(1) / (
            np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
        )
    cosine[~np.isfinite(cosine)] = 0.0
    return cosine


def rank_correlation(predicted: Sequence[float] | NDArray[np.floating], gold: Sequence[float]) -> float:
    """Spearman's rho x100: Pearson's correlation of ranks, ties at their average rank; 0 if one side is constant."""
    ranks = np.stack([rankdata(predicted), rankdata(gold)])
    centred = ranks - ranks.mean(1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1)
    return float(100 * centred[0] @ centred[1] / norms.prod()) if norms.all() else 0.0


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Line numbers, counted from 1, and rows."""
    first = next(read_lines(path), "")
    if _is_benchmark(first):
        yield from _benchmark_rows(path)
    else:
        for number, record in read_records(path):
            yield number, _columns(record, f"{path}, line {number}")


def _is_benchmark(line: str) -> bool:
    cells = line.split("\t")
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


def _number(score: object, where: str) -> float:
    try:
        number = float(score)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = float("nan")
    if not np.isfinite(number):
        raise CorpusError(f"{where}: score {score!r} is not a number")
    return number
