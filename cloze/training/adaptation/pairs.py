"""A user's judgements: which documents answer which queries, in the formats that users have.

| file | columns | what it says |
| --- | --- | --- |
| pairs, or a search log | `query` and `document` | the document, a text or the name of one, answers the query |
| graded pairs | `query`, `document` and `score` | above 0 it answers the query, at 0 or below it does not |
| duplicates | `sentence1`, `sentence2` and `label`: 1 or 0 | two texts of the same meaning, or not |
| classes | `text` and `label` | texts of one label belong together |
| a folder in BEIR's layout | | queries, documents and judgements |

Columns with other names are given in that order. Other names are known too (KINDS, SCORES). All formats become queries
with graded documents.
"""

import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from cloze.training.adaptation.documents import TEXT_FILES, Document
from cloze.training.bar import console
from cloze.training.data.corpus import finite_score, read_records
from cloze.training.errors import CorpusError
from cloze.training.evaluation.own_data import TRUTH
from cloze.training.evaluation.search import check_grade, load_collection

KINDS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {  # column names; the first set that is complete is read
    "scored": (("query", "document", "score"), ("query", "document", "label"), ("sentence1", "sentence2", "label")),
    "pairs": (
        ("query", "document"),
        ("query", "answer"),
        ("query", "url"),
        ("question", "answer"),
        ("anchor", "positive"),
        ("sent0", "sent1"),
        ("title", "body"),
    ),
    "classes": (("text", "label"),),
}
SCORES: Final = ("score", "label", "relevance", "grade")  # further columns that say whether the document answers
POSTS: Final = ("title", "body")  # pairs whose score says something else, such as the votes of a post

NAMES: Final = re.compile(r"[!-~]+")
FILE_NAME: Final = re.compile(  # a few words, and an ending that texts do not have
    r"(?:\S+ ){0,7}\S*\.(?:txt|md|markdown|html?|pdf|docx?|odt|rtf|epub|pptx?|odp|xlsx?|ods|rst|tex|xml|eml|msg)",
    re.IGNORECASE,
)
MANY_PASSAGES: Final = 20  # of one file that is named as an answer
CLASS_TEXTS: Final = 5000  # most labelled texts; each query has a judgement for every text of its label
CLASS_QUERIES: Final = 300

Item = TypeVar("Item")


@dataclass(frozen=True)
class Judgements:
    """`grades[i]` maps a document's index to its grade for query i: above 0 if it answers the query, else below."""

    queries: list[str]
    documents: list[str]
    grades: list[dict[int, float]]

    def __len__(self) -> int:
        return len(self.queries)

    def spellings(self) -> list[list[int]]:
        """Groups of queries, by their indices, that differ only in capitals and blanks."""
        same: dict[str, list[int]] = defaultdict(list)
        for number, query in enumerate(self.queries):
            same[" ".join(query.casefold().split())].append(number)
        return list(same.values())

    def relevant(self, query: int) -> list[int]:
        return [document for document, grade in self.grades[query].items() if grade > 0]


def read_pairs(path: Path, documents: Sequence[Document], columns: Sequence[str] = ()) -> Judgements:
    """The queries that some document answers, and all documents. Raises CorpusError."""
    if path.is_dir():
        if columns:
            raise CorpusError(f"{path} is a folder in BEIR's layout, which has fixed column names; omit --columns")
        collection = load_collection(path, "train")
        grades = [
            {place: float(grade or -1) for place, grade in relevance.items()} for relevance in collection.relevance
        ]
        return _joined(collection.queries, collection.documents, grades, documents)
    if not path.is_file():
        raise CorpusError(f"{path} is not a file or a folder; give a table of pairs, or a folder in BEIR's layout")
    rows = list(read_records(path))
    if not rows:
        raise CorpusError(f"{path} has no rows; give a table of pairs, or a folder in BEIR's layout")
    kind, names = _kind([record for _, record in rows], columns, path)
    cells = [(f"{path}, line {number}", _cells(record, names, f"{path}, line {number}")) for number, record in rows]
    if kind == "classes":
        classes = _classes([tuple(texts) for _, texts in cells], path)
        return _joined(classes.queries, classes.documents, classes.grades, documents)
    return _pairs(cells, documents, path)


def _kind(records: Sequence[dict[str, Any]], columns: Sequence[str], path: Path) -> tuple[str, tuple[str, ...]]:
    if len(columns) == 1:
        raise CorpusError(
            f"--columns names only {columns[0]}; name the columns of the query and of the document, and of a "
            "score if there is one"
        )
    if columns:  # in a pair, the column that is named first is the query
        known = ((kind, names) for kind, choices in KINDS.items() for names in choices if set(names) == set(columns))
        kind, names = next(known, ("pairs", tuple(columns)))
        return (kind, tuple(columns) if kind == "pairs" else names)
    record = records[0]
    for kind, choices in KINDS.items():
        for names in choices:
            if set(names) <= set(record):
                score = _score_of(records) if kind == "pairs" and names != POSTS else None
                return (kind, names) if score is None else ("scored", (*names, score))
    raise CorpusError(
        f"{path} has the columns {', '.join(map(str, record))}; give query and document, sentence1, sentence2 and "
        "label, or text and label; or name two or three columns with --columns"
    )


def _score_of(records: Sequence[dict[str, Any]]) -> str | None:
    """The column of SCORES that every row has, and whose cells are grades or empty, but not all empty."""

    def is_score(cell: str) -> bool:
        try:
            _grade(cell, "")
        except CorpusError:
            return False
        return True

    for name in SCORES:
        cells = ["" if record[name] is None else str(record[name]).strip() for record in records if name in record]
        if len(cells) == len(records) and any(cells) and all(not cell or is_score(cell) for cell in cells):
            console.print(f"reading the column {name}: above 0, the document answers; --columns chooses others")
            return name
        if cells:
            console.print(f"not reading the column {name}: it does not have a grade in every row")
    return None


def _cells(record: dict[str, Any], names: Sequence[str], location: str) -> list[str]:
    missing = [name for name in names if name not in record]
    if missing:
        raise CorpusError(f"{location}: no column {missing[0]!r}; name one of {', '.join(map(str, record))}")
    if nested := [name for name in names if isinstance(record[name], dict | list | bytes)]:
        raise CorpusError(f"{location}: {nested[0]} is {record[nested[0]]!s:.60}; write one text, in a row of its own")
    return ["" if record[name] is None else str(record[name]).strip() for name in names]


def _pairs(cells: Sequence[tuple[str, list[str]]], documents: Sequence[Document], path: Path) -> Judgements:
    """A document's cell is its text or the name of a document. Names of unknown documents are skipped."""
    judged = [  # the other rows lack a query or a judgement so far
        (query, answer, _grade(score[0], location) if score else 1.0)
        for location, (query, answer, *score) in cells
        if query and answer and query != answer and score != [""]  # a search is not to find its own query
    ]
    texts = dict.fromkeys(document.text for document in documents)
    texts_by_name = _texts_by_name(documents)
    named = {answer: _named(answer, texts_by_name) for _, answer, _ in judged}
    unknown = _unknown(named, documents)
    _refuse_names_alone(list(named), documents, path)
    graded: dict[str, dict[str, float]] = {}
    for query, answer, grade in judged:
        for text in [] if answer in unknown else named[answer] or [answer]:
            texts.setdefault(text)
            by_text, grade = graded.setdefault(query, {}), grade if grade > 0 else -1.0
            by_text[text] = max(grade, by_text.get(text, grade))  # in a log, a document may be judged many times
    places = {text: place for place, text in enumerate(texts)}
    answered = {query: by_text for query, by_text in graded.items() if any(grade > 0 for grade in by_text.values())}
    if unknown:
        problem = f"{path} names documents that are not in --documents, such as {min(unknown)!r}"
        if not answered:
            raise CorpusError(
                f"{problem}; the documents have names such as {documents[0].name!r}: write these, or the texts"
            )
        rows = sum(answer in unknown for _, answer, _ in judged)
        console.print(f"{problem}: skipped {rows:,} rows with such names")
    if long := [answer for answer, of_name in named.items() if len(of_name) > MANY_PASSAGES]:
        console.print(
            f"{path} names {len(long):,} files of more than {MANY_PASSAGES} passages, such as {long[0]!r}: each of "
            "these counts as an answer; write the text of the one that answers"
        )
    if not answered:
        raise CorpusError(f"{path} has no query with a document that answers it; give pairs with a score above 0")
    grades = [{places[text]: grade for text, grade in by_text.items()} for by_text in answered.values()]
    return Judgements(list(answered), list(texts), grades)


def _grade(cell: str, location: str) -> float:
    """The score of a row. Raises CorpusError."""
    truth = TRUTH.get(cell.lower())
    if truth is not None:
        return truth
    grade = finite_score(cell, location)
    check_grade(grade, location)
    return grade


def _texts_by_name(documents: Sequence[Document]) -> dict[str, list[str]]:
    """Name -> texts. A file can also be named by its path without the ending, if that is unique."""
    texts: dict[str, list[str]] = defaultdict(list)
    for document in documents:
        texts[_plain(document.name)].append(document.text)
    stems = {name: name.rpartition(".")[0] for name in texts if _is_file(name)}
    counts = Counter(stems.values())
    return {stem: texts[name] for name, stem in stems.items() if counts[stem] == 1} | texts


def _named(answer: str, texts_by_name: Mapping[str, list[str]]) -> list[str]:
    """The texts of the document that a cell names. A file's path may have further folders before it."""
    name = _plain(answer)
    while name not in texts_by_name and _is_file(name) and "/" in name:
        name = name.partition("/")[2]
    return texts_by_name.get(name, [])


def _refuse_names_alone(answers: Sequence[str], documents: Sequence[Document], path: Path) -> None:
    """Raises CorpusError if most answers are names of files, but there are no documents."""
    names = [answer for answer in answers if FILE_NAME.fullmatch(answer)]
    if not documents and len(names) > len(answers) / 2:
        raise CorpusError(f"{path} names files, such as {names[0]!r}; name their folder with --documents")


def _unknown(named: Mapping[str, list[str]], documents: Sequence[Document]) -> set[str]:
    """Cells that do not name a document and are not a text: a file's name, or a word if other cells are names.

    If no cell is the name or the text of a document, all are taken as names if they are visible ASCII without blanks.
    """
    if not documents:
        return set()
    texts = {document.text for document in documents}
    others = {answer for answer, of_name in named.items() if not of_name and answer not in texts}
    if len(others) == len(named) and NAMES.fullmatch("".join(others)):
        return others
    files, names = any(_is_file(document.name) for document in documents), any(named.values())
    return {
        answer
        for answer in others
        if (files and FILE_NAME.fullmatch(answer)) or (names and (NAMES.fullmatch(answer) or _is_file(answer)))
    }


def _plain(name: str) -> str:
    """A name in the form that is compared: some file systems separate letters and their accents."""
    return unicodedata.normalize("NFC", name).removeprefix("./")


def _is_file(name: str) -> bool:
    return name.lower().endswith(TEXT_FILES)


def _classes(rows: Sequence[tuple[str, ...]], path: Path) -> Judgements:
    """Each text is a query, and the other texts of its labels answer it. Many texts and queries are sampled."""
    labels: dict[str, set[str]] = defaultdict(set)
    for text, label in rows:
        if text and label:
            labels[text].add(label)
    rng = random.Random(0)
    texts = _sample(list(labels), CLASS_TEXTS, rng)
    members: dict[str, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        for label in labels[text]:
            members[label].append(place)
    answered = [place for place, text in enumerate(texts) if any(len(members[label]) > 1 for label in labels[text])]
    if len(members) < 2 or not answered:
        raise CorpusError(
            f"{path} has {len(members)} labels for {len(texts)} texts; give two labels or more, each with two texts or "
            "more"
        )
    queries = _sample(answered, CLASS_QUERIES, rng)
    grades = [
        {other: 1.0 for label in labels[texts[place]] for other in members[label] if other != place}
        for place in queries
    ]
    return Judgements([texts[place] for place in queries], texts, grades)


def _sample(items: list[Item], most: int, rng: random.Random) -> list[Item]:
    """At most `most` of the items, in their order."""
    return items if len(items) <= most else [items[place] for place in sorted(rng.sample(range(len(items)), most))]


def _joined(
    queries: list[str], texts: list[str], grades: Sequence[dict[int, float]], documents: Sequence[Document]
) -> Judgements:
    """Judgements over the documents of a collection and further documents."""
    known = set(texts)
    others = dict.fromkeys(document.text for document in documents if document.text not in known)
    return Judgements(queries, [*texts, *others], list(grades))
