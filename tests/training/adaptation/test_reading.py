"""Documents and judgements as people have them."""

import csv
import json
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest

from cloze.training.adaptation.documents import PASSAGE_WORDS, Document, read_documents
from cloze.training.adaptation.pairs import read_pairs
from cloze.training.errors import CorpusError
from cloze.training.evaluation.search import load_collection

MARKDOWN = """\
# Opening hours

The library is open from *Monday* to Friday.

- Lights go out at ten.
- Ask at the desk.

## Fees

A late book costs a pound.

| day | opens |
| --- | --- |
| Sunday | never |

```sh
lend --book
```
"""
HTML = """<html><head><title>x</title><style>p { color: red }</style></head><body><nav><p>Home</p></nav>
<h1>Loans</h1><p>Three <b>weeks</b>.</p><div><p>No more.</p></div><script>let a = "<p>no</p>"</script></body></html>"""


def table(file: Path, names: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        writer.writerows(rows)
    return file


def test_a_folder_of_files_becomes_passages_with_their_headings(tmp_path: Path) -> None:
    (tmp_path / "guide").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "notes.txt").write_text("hidden", encoding="utf-8")
    (tmp_path / "guide" / "hours.md").write_text(MARKDOWN, encoding="utf-8")
    (tmp_path / "loans.html").write_text(HTML, encoding="utf-8")
    (tmp_path / "plain.txt").write_text("One\nparagraph.\n\nAnother one.\n", encoding="utf-8")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert read_documents([tmp_path]) == [
        Document(
            "guide/hours.md",
            "Opening hours The library is open from Monday to Friday. Lights go out at ten. Ask at the desk.",
        ),
        Document("guide/hours.md", "Fees A late book costs a pound. day opens Sunday never lend --book"),
        Document("loans.html", "Loans Three weeks. No more."),
        Document("plain.txt", "One paragraph. Another one."),
    ]


def test_a_huge_file_is_cut_into_passages(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(5 * PASSAGE_WORDS + 7)]
    (tmp_path / "all.txt").write_text(" ".join(words), encoding="utf-8")
    found = read_documents([tmp_path / "all.txt"])
    assert [len(each.text.split()) for each in found] == [PASSAGE_WORDS] * 5 + [7]
    assert " ".join(each.text for each in found).split() == words


def test_a_row_is_a_document_with_its_title(tmp_path: Path) -> None:
    file = table(
        tmp_path / "pages.csv", ("id", "title", "body"), [(7, "Fees", "A pound."), (8, "", " "), (9, "", "Free.")]
    )
    assert read_documents([file]) == [Document("7", "Fees A pound."), Document("9", "Free.")]
    assert read_documents([file], ["body"]) == [Document("7", "A pound."), Document("9", "Free.")]


def test_a_column_of_text_comes_before_that_of_documents(tmp_path: Path) -> None:
    file = table(tmp_path / "pages.csv", ("document", "body"), [("d7", "A pound.")])
    assert read_documents([file]) == [Document("d7", "A pound.")]
    assert read_documents([table(file, ("document",), [("A pound.",)])]) == [Document("pages.csv:2", "A pound.")]


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        (
            "a.md",
            "# Notes\n\nNever in a <script> element, use `a`.\n\n## Second\n\nIt is about cookies.\n",
            ["Notes Never in a <script> element, use a.", "Second It is about cookies."],
        ),
        ("a.md", "Use Vec<T> or List<String>, H<sub>2</sub>O and **un**like<br>lines.", None),
        ("a.md", "<script>let a = 1</script>\n\n<div>kept</div>\n", ["kept"]),
        (
            "a.md",
            "# Soup\n\n## Ingredients\n\n- 3 onions\n\n## Steps\n\nFry.\n\n# End",
            ["Soup Ingredients 3 onions", "Steps Fry.", "End"],
        ),
        ("a.html", "<h1>Soup</h1><h2>Steps</h2><p>Fry <b>it</b>s.</p>", ["Soup Steps Fry its."]),
        (
            "a.md",
            "---\nMinutes of March\n\nWe buy an oven.\n\n---\n\nNext.",
            ["Minutes of March We buy an oven. Next."],
        ),
        ("a.md", "---\ntitle: x\n---\nText.", ["Text."]),
        ("a.md", "+++\ntitle = 'x'\n+++\nText.", ["Text."]),
    ],
)
def test_what_people_write_is_kept(tmp_path: Path, name: str, content: str, texts: list[str] | None) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    found = [document.text for document in read_documents([tmp_path / name])]
    assert found == (texts or ["Use Vec<T> or List<String>, H2O and unlike lines."])


def test_files_that_cannot_be_read_are_one_error_and_those_without_text_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {"a.txt": b"text", "b.md": b"", "c.html": b"<script>x"}.items():
        (tmp_path / name).write_bytes(content)
    assert len(read_documents([tmp_path])) == 1
    assert f"{tmp_path}: 2 files have no text, such as b.md" in capsys.readouterr().err
    for name in ("d.txt", "e.txt"):
        (tmp_path / name).write_bytes(b"caf\xe9")
    with pytest.raises(CorpusError, match=r"d\.txt.*UTF-8.*; 1 more files cannot be read either"):
        read_documents([tmp_path])


def test_files_that_are_not_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.csv", "c.docx", ".hidden"):
        (tmp_path / name).write_text("text", encoding="utf-8")
    assert [document.name for document in read_documents([tmp_path])] == ["a.txt"]
    assert f"{tmp_path}: skipped 2 files, such as b.csv; in a folder, only .txt, .md" in capsys.readouterr().err


def test_a_document_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "pages.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two", "one")), encoding="utf-8")
    documents = read_documents([file, file])
    assert [each.name for each in documents] == ["pages.jsonl:1", "pages.jsonl:2", "pages.jsonl:3"]
    rows = [("which", "pages.jsonl:3"), ("which", "two")]
    assert read_pairs(table(tmp_path / "pairs.csv", ("query", "document"), rows), documents).documents == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("pages.csv", "price,size\n1,2\n", "no column 'text'; it has price, size.* call the column of ids id"),
        ("pages.jsonl", "not JSON\n", "line 1: not JSON"),
        ("page.txt", "\n \n", "no document has a text"),
        ("page.docx", "", "cannot tell the format"),
    ],
)
def test_what_is_no_document_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CorpusError, match=words):
        read_documents([tmp_path / name])


def test_a_folder_without_text_and_a_missing_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"has no \.txt"):
        read_documents([tmp_path])
    with pytest.raises(CorpusError, match="does not exist"):
        read_documents([tmp_path / "none"])


def test_a_document_is_given_by_its_text_or_its_name(tmp_path: Path) -> None:
    documents = [Document("a.md", "first"), Document("a.md", "second"), Document("b.md", "third")]
    rows = [("open", "a.md"), ("open", "third"), ("fees", "not there"), ("fees", "not there"), ("", "third"), ("x", "")]
    found = read_pairs(table(tmp_path / "log.csv", ("query", "url"), rows), documents)
    assert found.queries == ["open", "fees"]
    assert found.documents == ["first", "second", "third", "not there"]
    assert found.grades == [{0: 1.0, 1: 1.0, 2: 1.0}, {3: 1.0}]


def test_grades_say_which_documents_do_not_answer(tmp_path: Path) -> None:
    rows = [("a", "x", 2), ("a", "y", 0), ("b", "y", 0), ("c", "x", 0.5)]
    found = read_pairs(table(tmp_path / "graded.csv", ("query", "document", "score"), rows), [])
    assert (found.queries, found.documents) == (["a", "c"], ["x", "y"])
    assert found.grades == [{0: 2.0, 1: -1.0}, {0: 0.5}]
    assert found.relevant(0) == [0]


def test_a_row_that_nobody_has_judged_is_skipped(tmp_path: Path) -> None:
    rows = [("a", "x", 1), ("a", "y", ""), ("b", "y", " ")]
    found = read_pairs(table(tmp_path / "graded.csv", ("query", "document", "score"), rows), [])
    assert (found.queries, found.documents, found.grades) == (["a"], ["x"], [{0: 1.0}])


@pytest.mark.parametrize(
    "names",
    [
        ("docs/guide/a.md", "/home/me/docs/b.md"),
        ("./guide/a.md", "https://example.com/b.md"),
        ("guide/a", "b"),
        ("guide/a.md", unicodedata.normalize("NFD", "Größe.html")),
        ("guide/a.md", "Größe"),
    ],
)
def test_a_file_is_named_as_people_do(names: tuple[str, str], tmp_path: Path) -> None:
    """With the folders before it, without its ending, and with accents as one letter or two."""
    documents = [Document("guide/a.md", "first text"), Document("b.md", "second text"), Document("Größe.html", "third")]
    answers = ["first text", "third" if "Gr" in names[1] else "second text"]
    file = table(tmp_path / "log.csv", ("query", "document"), [*zip(("open", "fees"), names, strict=True)])
    found = read_pairs(file, documents)
    assert [found.documents[place] for grades in found.grades for place in grades] == answers


def test_names_of_no_document_are_refused(tmp_path: Path) -> None:
    documents = [Document("a.md", "first text"), Document("b.md", "second text"), Document("b.html", "third text")]
    rows = [("open", "docs/c.md"), ("fees", "b")]
    with pytest.raises(
        CorpusError, match=r"are not in --documents, such as 'b'; the documents have names such as 'a\.md'"
    ):
        read_pairs(table(tmp_path / "log.csv", ("query", "document"), rows), documents)
    for texts in (("another text", "one more"), ("図書館は九時に開きます", "本は三週間借りられます")):
        file = table(tmp_path / "log.csv", ("query", "document"), [*zip(("open", "fees"), texts, strict=True)])
        assert len(read_pairs(file, documents).documents) == 5


def test_files_are_not_learnt_as_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not where --documents was forgotten, nor what `adapt` does not read."""
    rows = [("how long", "guide/hours of work.md"), ("what costs", "fees.md"), ("lend", "A text.")]
    with pytest.raises(CorpusError, match=r"names files, such as 'guide/hours of work\.md'; name their folder with"):
        read_pairs(table(tmp_path / "log.csv", ("query", "document"), rows), [])
    documents = [Document("fees.md", "A pound."), *(Document("long.md", f"Part {number}.") for number in range(21))]
    rows = [("costs", "fees.md"), ("scan", "alter Scan 3.pdf"), ("again", "alter Scan 3.pdf"), ("part", "long.md")]
    found = read_pairs(table(tmp_path / "log.csv", ("query", "document"), rows), documents)
    assert found.queries == ["costs", "part"]
    shown = capsys.readouterr().err
    assert "such as 'alter Scan 3.pdf': skipped 2 rows with such names" in shown
    assert "1 files of more than 20 passages, such as 'long.md': each of these counts as an answer" in shown


def test_rows_with_a_name_of_no_document_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [Document("a.md", "first text"), Document("b.md", "second text"), Document("7", "a row")]
    rows = [
        ("open", "a.md"),
        ("fees", "c.md"),
        ("paid", "our fees.md"),
        ("seen", "8"),
        ("ask", "Read the sign"),
    ]
    found = read_pairs(table(tmp_path / "log.csv", ("query", "document"), rows), documents)
    assert found.queries == ["open", "ask"]
    assert found.documents[3:] == ["Read the sign"]
    said = capsys.readouterr().err
    assert "log.csv names documents that are not in --documents, such as '8': skipped 3 rows with such names" in said


def test_a_row_without_an_id_is_not_named_by_its_line(tmp_path: Path) -> None:
    """Ids in a column of another name would otherwise name the rows next to theirs."""
    file = table(tmp_path / "pages.csv", ("ID", "text"), [(number, f"text {number}") for number in range(1, 6)])
    pairs = table(tmp_path / "log.csv", ("query", "document"), [(f"question {number}", number) for number in (2, 3)])
    with pytest.raises(CorpusError, match=r"such as '2'; the documents have names such as 'pages\.csv:2'"):
        read_pairs(pairs, read_documents([file]))


@pytest.mark.parametrize(
    "names",
    [
        ("query", "document", "relevance"),
        ("question", "answer", "label"),
        ("query", "url", "grade"),
        ("query", "answer", "score"),
    ],
)
def test_a_further_column_of_scores_is_read(names: tuple[str, str, str], tmp_path: Path) -> None:
    rows = [("a", "x", 1), ("a", "y", 0), ("a", "z", ""), ("b", "y", 0)]
    found = read_pairs(table(tmp_path / "graded.csv", names, rows), [])
    assert (found.queries, found.documents, found.grades) == (["a"], ["x", "y"], [{0: 1.0, 1: -1.0}])
    assert read_pairs(tmp_path / "graded.csv", [], names[:2]).queries == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "cells"),
    [
        (("query", "answer", "label"), ("billing", "loans")),
        (("query", "answer", "label"), ("", "loans")),
        (("query", "answer", "score"), ("", "")),
        (("query", "answer", "score"), (1, 5000)),
        (("title", "body", "score"), (3, 0)),
    ],
)
def test_a_further_column_of_something_else_is_not_read(
    names: tuple[str, str, str], cells: tuple[object, object], tmp_path: Path
) -> None:
    rows = [("a", "x", cells[0]), ("b", "y", cells[1])]
    assert len(read_pairs(table(tmp_path / "log.csv", names, rows), [])) == 2


def test_of_several_judgements_of_a_pair_the_highest_counts(tmp_path: Path) -> None:
    rows = [("a", "x", 0), ("a", "x", 2), ("a", "x", 1), ("a", "x", 0), ("a", "y", 0)]
    found = read_pairs(table(tmp_path / "log.csv", ("query", "document", "score"), rows), [])
    assert found.grades == [{0: 2.0, 1: -1.0}]


def test_a_text_without_blanks_is_cut_into_passages(tmp_path: Path) -> None:
    text = [f"{number}号图书馆九点开门，周日关闭。借书三周。迟还要付费。" for number in range(50)]
    (tmp_path / "hours.txt").write_text("\n\n".join([*text, "from Monday on"]), encoding="utf-8")
    found = [each.text for each in read_documents([tmp_path / "hours.txt"])]
    assert len(found) > 5
    assert max(map(len, found)) <= 2 * PASSAGE_WORDS
    assert "".join(found).replace(" ", "") == "".join(text) + "fromMondayon"
    assert found[-1].endswith("from Monday on")


def test_duplicates_are_graded_pairs(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    for yes, no in ((1, 0), (True, False), ("true", "false")):
        records = [{"sentence1": "a", "sentence2": text, "label": label} for text, label in (("x", yes), ("y", no))]
        file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        assert read_pairs(file, []).grades == [{0: 1.0, 1: -1.0}]


def test_classes_of_one_text_each_are_refused(tmp_path: Path) -> None:
    file = table(tmp_path / "classes.csv", ("text", "label"), [("pay", "bank"), ("rain", "sky"), ("rain", "sky")])
    with pytest.raises(CorpusError, match="has 2 labels for 2 texts; give two labels or more, each with two texts or"):
        read_pairs(file, [])


def test_texts_of_one_class_answer_each_other(tmp_path: Path) -> None:
    rows = [("pay", "bank"), ("card", "bank"), ("rain", "sky"), ("snow", "sky"), ("alone", "none")]
    rows += [("nobody has labelled this", ""), ("", "sky")]
    found = read_pairs(table(tmp_path / "classes.csv", ("text", "label"), rows), [])
    assert found.queries == ["pay", "card", "rain", "snow"]
    assert found.documents == ["pay", "card", "rain", "snow", "alone"]
    assert found.grades == [{1: 1.0}, {0: 1.0}, {3: 1.0}, {2: 1.0}]


def test_a_text_of_two_classes_answers_those_of_both(tmp_path: Path) -> None:
    rows = [("pay", "bank"), ("pay", "shop"), ("card", "bank"), ("till", "shop"), ("rain", "sky")]
    found = read_pairs(table(tmp_path / "classes.csv", ("text", "label"), rows), [])
    assert dict(zip(found.queries, found.grades, strict=True)) == {
        "pay": {1: 1.0, 2: 1.0},
        "card": {0: 1.0},
        "till": {0: 1.0},
    }


def test_of_many_texts_with_labels_a_sample_is_taken(tmp_path: Path) -> None:
    """Judgements are as many as texts of one class, squared."""
    rows = [(f"text {number}", str(number % 2)) for number in range(6000)]
    found = read_pairs(table(tmp_path / "classes.csv", ("text", "label"), rows), [])
    assert (len(found.queries), len(found.documents)) == (300, 5000)
    for query, grades in zip(found.queries, found.grades, strict=True):
        assert len(grades) > 2300
        assert {int(found.documents[place].split()[1]) % 2 for place in grades} == {int(query.split()[1]) % 2}


def test_texts_with_labels_are_ranked_among_the_documents_too(tmp_path: Path) -> None:
    rows = [("pay", "bank"), ("card", "bank"), ("rain", "sky"), ("snow", "sky")]
    found = read_pairs(table(tmp_path / "classes.csv", ("text", "label"), rows), [Document("a", "a fee")])
    assert found.documents == ["pay", "card", "rain", "snow", "a fee"]


def test_a_query_does_not_answer_itself(tmp_path: Path) -> None:
    rows = [("pay", "pay"), ("rain", "rain"), ("rain", "it rains")]
    found = read_pairs(table(tmp_path / "pairs.csv", ("query", "document"), rows), [])
    assert (found.queries, found.documents) == (["rain"], ["it rains"])


def test_columns_where_there_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("A page with words.")
    with pytest.raises(CorpusError, match="--document-columns names columns of tables, but --documents has no table"):
        read_documents([tmp_path], ["body"])
    with pytest.raises(CorpusError, match="is a folder in BEIR's layout, which has fixed column names; omit --columns"):
        read_pairs(tmp_path, [], ["a", "b"])


def test_columns_of_known_names_keep_their_meaning(tmp_path: Path) -> None:
    rows = [("pay", "bank"), ("card", "bank"), ("rain", "sky"), ("snow", "sky")]
    file = table(tmp_path / "classes.csv", ("text", "label"), rows)
    assert read_pairs(file, [], ["text", "label"]) == read_pairs(file, [], ["label", "text"]) == read_pairs(file, [])


def test_of_several_splits_the_one_for_training_is_learnt(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "text": "x"}\n{"_id": "2", "text": "y"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "a"}\n{"_id": "r", "text": "b"}\n')
    for split, query in (("train", "q"), ("test", "r")):
        rows = f"query-id\tcorpus-id\tscore\n{query}\t1\t1\n"
        (tmp_path / "qrels" / f"{split}.tsv").write_text(rows)
    assert read_pairs(tmp_path, []).queries == ["a"]
    assert load_collection(tmp_path).queries == load_collection(tmp_path, "dev").queries == ["b"]


def test_a_folder_in_beirs_layout_has_everything(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "title": "T", "text": "x"}\n{"_id": "2", "text": "y"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "a"}\n')
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\t1\t2\nq\t2\t0\n")
    found = read_pairs(tmp_path, [Document("z", "z"), Document("x", "T x")])
    assert found.documents == ["T x", "y", "z"]
    assert found.grades == [{0: 2.0, 1: -1.0}]


def test_other_columns_are_named(tmp_path: Path) -> None:
    file = table(tmp_path / "log.csv", ("asked", "clicked", "n"), [("a", "x", 3)])
    assert read_pairs(file, [], ["asked", "clicked"]).grades == [{0: 1.0}]
    assert read_pairs(file, [], ["asked", "clicked", "n"]).grades == [{0: 3.0}]
    with pytest.raises(CorpusError, match="has the columns asked, clicked, n; give query and document"):
        read_pairs(file, [])
    with pytest.raises(CorpusError, match="--columns names only asked"):
        read_pairs(file, [], ["asked"])
    with pytest.raises(CorpusError, match="no column 'q'; name one of asked"):
        read_pairs(file, [], ["q", "clicked"])


@pytest.mark.parametrize(
    ("names", "rows", "words"),
    [
        (("query", "document"), [], "has no rows"),
        (("query", "document"), [("", "x")], "no query with a document that answers it"),
        (("query", "document", "score"), [("a", "x", "high")], "score 'high' is not a number"),
        (("text", "label"), [("a", "1"), ("b", "1")], "has 1 labels for 2 texts"),
    ],
)
def test_what_is_no_judgement_is_named(
    tmp_path: Path, names: Sequence[str], rows: Sequence[Sequence[object]], words: str
) -> None:
    with pytest.raises(CorpusError, match=words):
        read_pairs(table(tmp_path / "pairs.csv", names, rows), [])


def test_a_text_has_every_name_that_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "documents.csv"
    file.write_text("id,text\np1,The same.\np2,The same.\np3,Another.\n", encoding="utf-8")
    (tmp_path / "pairs.csv").write_text("query,document\nwhich,p2\n", encoding="utf-8")
    judged = read_pairs(tmp_path / "pairs.csv", read_documents([file]))
    assert judged.documents == ["The same.", "Another."]
    assert judged.grades == [{0: 1.0}]


def test_the_title_may_be_the_only_column_of_text(tmp_path: Path) -> None:
    file = tmp_path / "documents.csv"
    file.write_text("id,title\n1,A pound\n", encoding="utf-8")
    assert read_documents([file], ["title"]) == [Document("1", "A pound")]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.md",
            "- Install it\n  - on Linux\n  - on a Mac\n- Then start it\n",
            "Install it on Linux on a Mac Then start it",
        ),
        (
            "b.md",
            "---\ntitle: no\ntags: [a]\n---\n# Fees\n\nA pound.\n\n---\n\nor two\n\n---\n",
            "Fees A pound. or two",
        ),
        (
            "a.html",
            "<title>no</title><div>In a <b>div</b>.</div><p>para</p> loose <!-- no -->",
            "In a div. para loose",
        ),
        ("b.html", "<ul><li>outer<p>inner</p>tail</li><li>outer</li></ul>", "outer inner tail outer"),
        (
            "c.html",
            "<h2>Fees</h2><section>A pound.<h3>Late</h3><td>Two.</td><td>Two.</td></section>",
            "Fees A pound.|Late Two. Two.",
        ),
    ],
)
def test_no_text_of_a_page_is_lost(name: str, text: str, expected: str, tmp_path: Path) -> None:
    """Of list items with lists in them, of pages that are made of divisions, and of what stands in no block."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert "|".join(document.text for document in read_documents([tmp_path / name])) == expected


def test_an_object_or_a_list_is_not_a_text(tmp_path: Path) -> None:
    file = tmp_path / "nested.jsonl"
    file.write_text('{"text": {"raw": "a"}, "query": "b", "document": ["c", "d"]}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"line 1: text is \{'raw': 'a'\}; write a text"):
        read_documents([file], ())
    with pytest.raises(CorpusError, match=r"line 1: document is \['c', 'd'\]; write one text, in a row of its own"):
        read_pairs(file, [])


def test_a_number_that_is_too_large_for_a_grade_is_refused(tmp_path: Path) -> None:
    """nDCG takes memory in proportion to it, and gives 0 for every query when there is none left."""
    file = table(tmp_path / "ids.csv", ("query", "document", "score"), [("a", "x", 1), ("b", "y", 3_000_000_000)])
    with pytest.raises(CorpusError, match=r"ids\.csv, line 3: score 3000000000 is not a grade: the largest is 1000"):
        read_pairs(file, [])


def test_a_linked_folder_is_read_and_a_circle_once(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "b.txt").write_text("Two.\n", encoding="utf-8")
    (tmp_path / "docs" / "a.txt").write_text("One.\n", encoding="utf-8")
    (tmp_path / "docs" / "more").symlink_to(tmp_path / "disk")
    (tmp_path / "docs" / "again").symlink_to(tmp_path / "docs")
    assert [document.name for document in read_documents([tmp_path / "docs"])] == ["a.txt", "more/b.txt"]
    for name in ("real", "other", "z"):  # however the file system lists them
        (tmp_path / name).mkdir()
        (tmp_path / name / "inside").mkdir()
        (tmp_path / name / "inside" / "c.txt").write_text("Three.\n", encoding="utf-8")
        (tmp_path / name / "a-link").symlink_to(tmp_path / name / "inside")
        assert [document.name for document in read_documents([tmp_path / name])] == ["inside/c.txt"]


def test_a_file_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "docs") + b"/caf\xe9.txt")).write_text("One.\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"the name of the file b'.*caf\\xe9\.txt' is not UTF-8; rename the file"):
        read_documents([tmp_path / "docs"])


def test_the_name_of_a_file_that_is_not_read_may_be_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("One.\n", encoding="utf-8")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.pdf")).touch()
    assert [document.name for document in read_documents([tmp_path])] == ["a.txt"]
    assert "skipped 1 files, such as caf\ufffd.pdf" in capsys.readouterr().err
