"""A user's own data as csv, tsv, jsonl or parquet files: duplicate pairs, triplets and labelled texts.

| data | columns |
| --- | --- |
| duplicate pairs | `sentence1`, `sentence2`, `label`: 1 for the same meaning, 0 for another |
| triplets | `anchor`, `positive`, `negative`; or `sent0`, `sent1`, `hard_neg` |
| labelled texts | `text`, `label` |

`cloze.training.evaluation.sts` reads pairs with a `score`.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from cloze.training.data.corpus import read_records
from cloze.training.errors import CorpusError
from cloze.training.evaluation.measures import Embed, Pairs, in_columns, units

Triplets: TypeAlias = list[tuple[str, str, str]]
"""Anchor, positive and negative."""

Label = TypeVar("Label", bound=Hashable)

TRIPLETS: Final = (("anchor", "positive", "negative"), ("sent0", "sent1", "hard_neg"))
TRUTH: Final = {"1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0, "true": 1.0, "false": 0.0}


def columns_of(path: Path) -> set[str]:
    """The column names of a file's first row. Raises CorpusError."""
    if not path.is_file():
        raise CorpusError(f"{path} is not a file; give a .csv, .tsv, .jsonl or .parquet file")
    for _, record in read_records(path):
        return set(record)
    raise CorpusError(f"{path} has no rows; give a file that has some")


def load_duplicates(path: Path) -> Pairs:
    """Read pairs whose gold is 1 or 0. Raises CorpusError, which names the file and the line."""
    pairs = Pairs([], [], [])
    for where, (left, right, label) in _cells(path, ("sentence1", "sentence2", "label")):
        if label.lower() not in TRUTH:
            raise CorpusError(
                f"{where}: label {label!r} is neither 1 nor 0; write 1 for pairs with the same meaning, 0 for others"
            )
        pairs.left.append(left)
        pairs.right.append(right)
        pairs.gold.append(TRUTH[label.lower()])
    if len(set(pairs.gold)) < 2:
        raise CorpusError(f"{path} has only the label {pairs.gold[0]:g}; give pairs with 1 and pairs with 0")
    return pairs


def load_triplets(path: Path) -> Triplets:
    """Read triplets. Raises CorpusError, which names the file and the line."""
    columns = columns_of(path)
    names = next((names for names in TRIPLETS if set(names) <= columns), TRIPLETS[0])
    triplets = [(anchor, positive, negative) for _, (anchor, positive, negative) in _cells(path, names)]
    if len(triplets) < 2:
        raise CorpusError(f"{path} has one triplet, so its accuracy can only be 0 or 100; give more")
    return triplets


def triplet_margins(embed: Embed, triplets: Triplets) -> NDArray[np.float64]:
    """The anchor's cosine with the positive minus its cosine with the negative, (n)."""
    anchor, positive, negative = map(units, in_columns(embed, *zip(*triplets, strict=True)))
    margins: NDArray[np.float64] = (anchor * positive).sum(1) - (anchor * negative).sum(1)
    return margins


def shares_right(margins: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each triplet (n): 1 if the positive is closer, 0 if the negative is, and a half for equal cosines."""
    shares: NDArray[np.float64] = (1 + np.sign(margins)) / 2
    return shares


def load_labels(path: Path, minimum: int) -> tuple[list[str], list[str]]:
    """Texts and their labels; at least two labels, with `minimum` texts each. Raises CorpusError.

    Rows that differ only in capitals and blanks count once: a held-out text must not also be one that is learnt from.
    """
    rows = _distinct((text, label) for _, (text, label) in _cells(path, ("text", "label")))
    counts = Counter(label for _, label in rows)
    rarest = min(counts, key=counts.__getitem__)
    if len(counts) < 2 or counts[rarest] < minimum:
        raise CorpusError(
            f"{path} has {len(counts)} labels, and the rarest, {rarest!r}, has {counts[rarest]} texts; give two labels "
            f"or more, with {minimum} texts each"
        )
    return [text for text, _ in rows], [label for _, label in rows]


def load_label_sets(path: Path, separator: str, minimum: int) -> tuple[list[str], list[frozenset[str]]]:
    """Texts and their labels. A text may have none, or several that are separated by `separator`.

    Each label has at least `minimum` texts, and at least as many texts lack it. Rows that differ only in capitals and
    blanks count once. Raises CorpusError.
    """
    cells = _cells(path, ("text", "label"), may_be_empty=("label",))
    split = ((text, frozenset(map(str.strip, cell.split(separator))) - {""}) for _, (text, cell) in cells)
    rows = _distinct(split)  # labels in another order are equal
    labels = [text_labels for _, text_labels in rows]
    counts = Counter(label for text_labels in labels for label in text_labels)
    for label, count in counts.items():
        if min(count, len(rows) - count) < minimum:
            raise CorpusError(
                f"{path} has {count} texts with the label {label!r} and {len(rows) - count} without it; give {minimum} "
                "or more of each"
            )
    if not counts:
        raise CorpusError(f"{path} has no labels; write them into the column label")
    return [text for text, _ in rows], labels


def _distinct(rows: Iterable[tuple[str, Label]]) -> list[tuple[str, Label]]:
    """The first of each group of rows with equal labels and texts that differ only in capitals and blanks."""
    first: dict[tuple[str, Label], tuple[str, Label]] = {}
    for text, label in rows:
        first.setdefault((" ".join(text.casefold().split()), label), (text, label))
    return list(first.values())


def _cells(path: Path, names: Sequence[str], may_be_empty: Sequence[str] = ()) -> list[tuple[str, list[str]]]:
    """The location of each row, and its cells as texts without surrounding white space."""
    columns = columns_of(path)
    missing = [name for name in names if name not in columns]
    if missing:
        raise CorpusError(
            f"{path} has no column {', '.join(missing)} (it has {', '.join(sorted(columns))}); name the columns "
            f"{', '.join(names)}"
        )
    rows = []
    for number, record in read_records(path):
        cells = [str(record[name]).strip() if record.get(name) is not None else "" for name in names]
        where = f"{path}, line {number}"
        for name, cell in zip(names, cells, strict=True):
            if isinstance(record.get(name), list | dict | bytes):
                raise CorpusError(f"{where}: {name} is {cell:.60}; write one text, as in a csv")
            if not cell and name not in may_be_empty:
                needed = ", ".join(name for name in names if name not in may_be_empty)
                raise CorpusError(f"{where}: {name} is empty; every row needs {needed}")
        rows.append((where, cells))
    return rows
