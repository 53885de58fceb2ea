"""A user's documents: rows of a table, or the passages of text, Markdown and HTML files.

A row (csv, tsv, jsonl, parquet) is a document: its title, a blank, and its text. A text file is longer than an
encoder's input, so it is cut at blank lines and headings into passages of up to `PASSAGE_WORDS` words, each with the
heading above it. In scripts without blanks, such as Chinese, each character counts as a word.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final

from bs4 import BeautifulSoup
from bs4.element import NavigableString
from markdown_it import MarkdownIt

from cloze.training.bar import bar, console
from cloze.training.data.corpus import files_below, named_in_utf8, read_lines, read_records
from cloze.training.data.words import spaced_words
from cloze.training.errors import CorpusError

PASSAGE_WORDS: Final = 200
TEXT_FILES: Final = (".txt", ".md", ".markdown", ".html", ".htm")
TABLES: Final = (".csv", ".tsv", ".jsonl", ".parquet")
HEADINGS: Final = ("h1", "h2", "h3", "h4", "h5", "h6")
BLOCKS: Final = [
    *HEADINGS,
    *("p", "li", "pre", "td", "th", "dt", "dd", "blockquote", "figcaption", "caption", "summary", "details"),
    *("div", "section", "article", "main", "aside", "header", "footer", "address", "figure", "form", "body"),
    *("option", "button", "label", "legend"),
]
ELEMENTS: Final = frozenset(  # HTML elements besides BLOCKS and UNSEEN
    "a abbr audio b base bdi bdo br canvas center cite code col colgroup data datalist del dfn dialog dl em embed "  # noqa: SIM905
    "fieldset font head hgroup hr html i iframe img input ins kbd link map mark menu meta meter object ol optgroup "
    "output picture progress q rp rt ruby s samp search select slot small source span strike strong sub sup svg table "
    "tbody tfoot thead time tr track tt u ul var video wbr".split()
)
RAW: Final = ("script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes")  # raw text to their end
TAG: Final = re.compile(r"<(?=/?([A-Za-z][\w:-]*))")
FRONT_MATTER: Final = re.compile(  # of Markdown: YAML whose first line is a key, or TOML
    r"\A(?:---[ \t]*\r?\n(?=(?:[ \t]*(?:#.*)?\r?\n)*[\w\"'-]+[ \t]*:).*?^(?:---|\.\.\.)|"
    r"\+\+\+[ \t]*\r?\n.*?^\+\+\+)[ \t]*\r?$",
    re.MULTILINE | re.DOTALL,
)
UNSEEN: Final = ("script", "style", "nav", "template", "noscript", "title")  # elements without visible text of the page
TEXTS: Final = ("text", "body", "content", "passage", "description", "document")  # columns; the first that exists
TITLES: Final = ("title", "heading", "name", "subject")
NAMES: Final = ("_id", "id", "doc_id", "document_id", "url", "path", "document")  # skipped if it holds the text


@dataclass(frozen=True)
class Document:
    """Pairs may refer to it by `name`: a row's id, or a file's path below its folder. A file's passages share it.

    A row without an id is named by its table and line, such as `pages.csv:2`: a number alone could be another row's id.
    """

    name: str
    text: str


def read_documents(paths: Sequence[Path], columns: Sequence[str] = ()) -> list[Document]:
    """The documents of files and folders. `columns` are columns of tables, whose texts are joined by a blank.

    Hidden files are skipped. A text with several names is a document for each of them. Raises CorpusError.
    """
    if columns and all(path.is_dir() or path.suffix.lower() in TEXT_FILES for path in paths):
        raise CorpusError(
            "--document-columns names columns of tables, but --documents has no table; omit it, or give a table"
        )
    documents = dict.fromkeys(chain.from_iterable(_read(path, columns) for path in paths))
    if not documents:
        raise CorpusError(
            f"{', '.join(map(str, paths))}: no document has a text; give {', '.join(TEXT_FILES + TABLES)}"
        )
    return list(documents)


def _text_of(record: dict[str, Any], columns: Sequence[str], location: str) -> str:
    """The text of a row. Raises CorpusError if it has none of the columns."""
    titled = [column for column in TITLES if isinstance(record.get(column), str)][:1]
    chosen = columns or [*titled, *[column for column in TEXTS if column in record][:1]]
    missing = [column for column in columns if column not in record]
    if missing or not (columns or set(chosen) - set(titled)):
        lacking = missing or [TEXTS[0]]
        raise CorpusError(
            f"{location}: no column {lacking[0]!r}; it has {', '.join(map(str, record))}: name the text columns "
            f"with --document-columns, and call the column of ids {NAMES[1]}"
        )
    if nested := [column for column in chosen if isinstance(record[column], dict | list | bytes)]:
        raise CorpusError(f"{location}: {nested[0]} is {record[nested[0]]!s:.60}; write a text")
    return " ".join(str(record[column]).strip() for column in chosen if record[column] is not None).strip()


def _read(path: Path, columns: Sequence[str]) -> Iterator[Document]:
    """The documents of a file, or of a folder's files at any depth, sorted by name. Raises CorpusError."""
    if path.is_dir():
        files = files_below(path)
        texts = [named_in_utf8(file) for file in files if file.suffix.lower() in TEXT_FILES]
        if not texts:
            raise CorpusError(
                f"{path} has no {', '.join(TEXT_FILES)} files; name tables ({', '.join(TABLES)}) as files"
            )
        if others := sorted(set(files) - set(texts)):
            example = os.fsencode(others[0].relative_to(path)).decode("utf-8", "replace")
            console.print(
                f"{path}: skipped {len(others):,} files, such as {example}; in a folder, only "
                f"{', '.join(TEXT_FILES)} are read, so name tables as files"
            )
        yield from _of_files({file.relative_to(path).as_posix(): file for file in texts}, path)
    elif not path.is_file():
        raise CorpusError(f"{path} does not exist; give a folder or a file of documents")
    elif path.suffix.lower() in TEXT_FILES:
        yield from _passages(path, path.name)
    else:
        for number, record in read_records(path):
            text = _text_of(record, columns, f"{path}, line {number}")
            ids = (str(record[key]) for key in NAMES if record.get(key) not in (None, text))
            if text:
                yield Document(next(ids, f"{path.name}:{number}"), text)


def _of_files(files: dict[str, Path], folder: Path) -> Iterator[Document]:
    """The passages of a folder's files. Raises a single CorpusError for all files that cannot be read."""
    empty, problems = list[str](), list[str]()
    for name, file in bar(files.items(), desc="reading", unit=" files"):
        try:
            passages = list(_passages(file, name))
        except CorpusError as error:
            problems.append(str(error))
            continue
        yield from passages
        if not passages:
            empty.append(name)
    if problems:
        others = f"; {len(problems) - 1:,} more files cannot be read either" if len(problems) > 1 else ""
        raise CorpusError(problems[0] + others)
    if empty:
        console.print(f"{folder}: {len(empty):,} files have no text, such as {empty[0]}")


def _passages(file: Path, name: str) -> Iterator[Document]:
    heading, words, used = "", list[str](), True
    for is_heading, block in _blocks(file):
        new = spaced_words(block)
        if words and (is_heading or len(words) + len(new) > PASSAGE_WORDS):
            yield Document(name, f"{heading}{''.join(words)}".strip())
            words = []
        if is_heading:  # directly after another heading, it is appended to that one
            heading = "".join(new) if used else heading + "".join(new)
            used = False
            continue
        words += new
        used = True
        last = (len(words) - 1) // PASSAGE_WORDS * PASSAGE_WORDS
        for first in range(0, last, PASSAGE_WORDS):
            yield Document(name, f"{heading}{''.join(words[first : first + PASSAGE_WORDS])}".strip())
        words = words[last:]
    if words or not used:
        yield Document(name, f"{heading}{''.join(words)}".strip())


def _blocks(file: Path) -> Iterator[tuple[bool, str]]:
    """Whether each block of a file is a heading, and its text."""
    text = "".join(read_lines(file))
    if file.suffix.lower() == ".txt":
        yield from ((False, block) for block in re.split(r"\n\s*\n", text) if block.strip())
        return
    if not file.suffix.lower().startswith(".htm"):
        markdown = MarkdownIt("gfm-like", {"linkify": False})
        for rule in ("html_inline", "html_block"):
            markdown.add_render_rule(rule, lambda _, tokens, place, *__: _escaped(tokens[place].content))
        text = markdown.render(FRONT_MATTER.sub("", text))
    soup = BeautifulSoup(text, "html.parser")
    for tag in soup(list(UNSEEN)):
        tag.decompose()
    for tag in soup(["br", "wbr", "hr", "img"]):
        tag.replace_with(" ")
    strings = (string for string in soup.find_all(string=True) if type(string) is NavigableString)
    for _, group in groupby(strings, key=lambda string: id(string.find_parent(BLOCKS))):  # equal blocks stay separate
        first, *others = group
        block = first.find_parent(BLOCKS)
        if words := " ".join("".join((first, *others)).split()):
            yield block is not None and block.name in HEADINGS, words


def _escaped(html: str) -> str:
    """Escape what is not HTML in Markdown's HTML, such as List<String>, and a <script> that is not closed."""

    def escaped(tag: re.Match[str]) -> str:
        name = tag[1].lower()
        known = name in ELEMENTS or name in BLOCKS or name in UNSEEN
        is_open = name in RAW and f"</{name}" not in html.lower()
        return "<" if known and not is_open else "&lt;"

    return TAG.sub(escaped, html)
