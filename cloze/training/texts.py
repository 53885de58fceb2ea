"""cloze texts OUT --corpus FILES: make texts from which a student learns search as well as similarity.

Consecutive sentences become sentences, passages and short queries, in OUT/texts.jsonl: each once, in a random order.
If one pass over the sentences does not make enough texts, further passes make different ones from the same sentences.
Texts that stand alone, such as questions or definitions, are not changed.

Other passages of each source are held out, in OUT/retrieval/SOURCE: a retrieval collection in which each query is a
sentence that was taken out of a passage (the inverse cloze task, arXiv:1906.00300), half of them cut to a few words.
`cloze evaluate MODEL --data OUT --suite retrieval` scores all collections.
"""

import csv
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field
from pydantic_settings import CliPositionalArg, CliVariadicArg

from cloze.command import run
from cloze.encoding.files import check_folder
from cloze.encoding.rows import SEMICOLON, SEPARATORS
from cloze.options import Options
from cloze.training.bar import bar, console
from cloze.training.data.corpus import Corpus, files_below, read_corpus, read_lines, read_records
from cloze.training.data.words import lower_words, spaced_words, words_of
from cloze.training.errors import CorpusError, RunError

Count = Annotated[int, Field(ge=0)]
ARTICLE: Final = 400  # most sentences between empty lines; a longer sequence is cut into blocks
BLOCK: Final = 40  # consecutive sentences of a block; texts are made within a block, which is trained on or held out
PASSAGE_WORDS: Final = (50, 400)
FEWEST_SENTENCES: Final = 3  # of a held-out passage; one of them becomes the query
FEWEST_WORDS: Final = 4  # of its query; fewer would fit many passages
SENTENCE_ENDS: Final = re.compile(r"(?<=[.!?])\s+")
QUERY_WORDS: Final = 9  # of a query, at most
QUESTION_SHARE: Final = 0.25  # of the queries begin with a question word
BARE_SHARE: Final = 0.25  # of the queries lose the punctuation around them
HELD_OUT_SHARE: Final = 0.1  # of a source's sentences, at most
QUESTIONS: Final = ("what is", "what are", "how does", "how to", "who is", "why is", "where is", "when was")


class TextsOptions(Options):
    """Make training texts for `cloze fit distill --teacher-vectors` from consecutive sentences."""

    out: CliPositionalArg[Path] = Field(description="folder to write texts.jsonl and retrieval/ to")
    corpus: CliVariadicArg[list[str]] = Field(
        min_length=1,
        description="sources: files, or quoted glob patterns, of consecutive sentences, such as articles, one "
        "sentence per line, with an empty line between articles",
    )
    singles: CliVariadicArg[list[str]] = Field(
        [],
        description="files of texts that stand alone, such as questions, one per line; no passage contains them",
    )
    columns: CliVariadicArg[list[str]] = Field(
        [], max_length=1, description="the text column of csv, tsv, jsonl or parquet files"
    )
    sentences: Count = Field(160_000, description="sentences to train on")
    passages: Count = Field(20_000, description="passages of 50 to 400 words to train on")
    queries: Count = Field(120_000, description="queries to train on; each is a few words of a sentence")
    single_texts: Count = Field(0, description="texts of --singles to train on")
    held_out: Count = Field(
        10_000,
        description="passages of each source to hold out of training, with at most a tenth of its sentences",
    )
    held_out_queries: Count = Field(2_000, description="maximum number of queries in each source's held-out collection")
    exclude: CliVariadicArg[list[Path]] = Field(
        [],
        description="files and folders of evaluation data, whose texts and sentences are excluded from the result; "
        "hidden files in a folder are skipped",
    )
    seed: Count = Field(0, description="seed of the random choice")


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ClozeError."""
    options = TextsOptions.parse(arguments, "cloze texts")
    if options.held_out_queries > options.held_out:
        raise CorpusError(
            f"--held-out-queries is {options.held_out_queries:,}, but --held-out is {options.held_out:,}; each query "
            "needs a passage of its own: lower the former, or raise the latter"
        )
    if options.held_out and not options.held_out_queries:
        raise CorpusError(
            f"--held-out is {options.held_out:,}, but --held-out-queries is 0, and a collection without queries cannot "
            "be scored; raise the latter, or set both to 0"
        )
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise RunError(f"{options.out} is not an empty folder; choose another, or remove it")
    if options.single_texts and not options.singles:
        raise CorpusError(
            f"--single-texts is {options.single_texts:,}, but --singles does not name their file; add --singles"
        )
    if options.singles and not options.single_texts:
        raise CorpusError(
            "--singles is given, but --single-texts is 0, so none of its texts would be used; say how many to use"
        )
    check_folder(options.out)
    excluded = {
        digest for path in options.exclude for text in _texts_of(path) for digest in map(_digest, _with_sentences(text))
    }
    rng, seen, singles = random.Random(options.seed), set(excluded), _read_singles(options)
    blocks: list[list[str]] = []
    collections: dict[str, list[tuple[str, str | None]]] = {}
    for source in options.corpus:
        corpus = read_corpus([source], options.columns)
        own = _blocks(corpus, seen, rng)
        collection, rest = _held_out(own, len(corpus), options, rng)
        if collection:
            collections[_name(source, collections)] = collection
        blocks += chain(rest, own)
    rng.shuffle(blocks)
    targets = {"passage": options.passages, "query": options.queries, "sentence": options.sentences}
    composed = _composed(blocks, targets, set(excluded), rng)
    texts = list(bar(composed, total=sum(targets.values()), desc="making", unit=" texts"))
    seen.update(_digest(text) for _, text in texts)
    texts += [("single", text) for text in _singles(options, singles, seen, rng)]
    rng.shuffle(texts)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, collection in collections.items():
        _write_collection(options.out / "retrieval" / name, collection)
    _write(options.out / "texts.jsonl", ({"kind": kind, "text": text, "words": bare(text)} for kind, text in texts))
    counts = Counter(kind for kind, _ in texts)
    counted = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
    passages = sum(map(len, collections.values()))
    held_out = f"{passages:,} passages of {len(collections)} sources held out; without {len(excluded):,} excluded texts"
    console.print(f"{options.out}: {counted} to train on; {held_out}")


def _name(source: str, used: Collection[str]) -> str:
    """A unique folder name for the collection of a file or a pattern."""
    name = re.sub(r"\W+", "-", Path(source).name.partition(".")[0]).strip("-") or "texts"
    names = chain([name], (f"{name}-{number}" for number in range(2, len(used) + 2)))
    return next(candidate for candidate in names if candidate not in used)


def _read_singles(options: TextsOptions) -> dict[int, str]:
    """The texts that stand alone, by their digests. Raises CorpusError if there are too few."""
    if not options.single_texts:
        return {}
    singles = {_digest(text): text for (text,) in read_corpus(options.singles, options.columns).rows}
    _check_singles(len(singles), options)
    return singles


def _singles(options: TextsOptions, singles: dict[int, str], seen: set[int], rng: random.Random) -> list[str]:
    """A sample of the singles without those in `seen`. Raises CorpusError if there are too few."""
    unseen = [text for digest, text in singles.items() if digest not in seen]
    _check_singles(len(unseen), options)
    return rng.sample(unseen, options.single_texts)


def _check_singles(count: int, options: TextsOptions) -> None:
    if count < options.single_texts:
        raise CorpusError(f"--singles has {count:,} texts, not {options.single_texts:,}; lower --single-texts")


def _blocks(corpus: Corpus, seen: set[int], rng: random.Random) -> Iterator[list[str]]:
    """Articles of a source, or blocks of long ones, in a random order.

    `seen` has digests. A sentence in `seen` ends a block; the others are added to `seen`, so that none is read twice.
    """
    ends = [*corpus.starts, len(corpus)]
    spans = [
        (start, min(start + size, end))
        for begin, end in pairwise(ends)
        for size in [end - begin if end - begin <= ARTICLE else BLOCK]
        for start in range(begin, end, size)
    ]
    rng.shuffle(spans)
    for start, end in bar(spans, desc="sentences", unit=" blocks"):
        block: list[str] = []
        for (sentence,) in corpus.rows[start:end]:
            digest = _digest(sentence)
            if digest not in seen:
                seen.add(digest)
                block.append(sentence)
            elif block:
                yield block
                block = []
        if block:
            yield block


def _composed(
    blocks: Sequence[list[str]], targets: dict[str, int], seen: set[int], rng: random.Random
) -> Iterator[tuple[str, str]]:
    """Texts with their kinds, as many of each as `targets` says. None is in `seen`; their digests are added to it.

    The blocks are read again as long as they give new texts. Raises CorpusError if they give too few.
    """
    remaining = dict(targets)
    while any(remaining.values()):
        before = dict(remaining)
        for block in blocks:
            while block and any(remaining.values()):
                (kind,) = rng.choices(list(remaining), list(remaining.values()))
                passage, following = _passage(block, rng) if kind == "passage" else ("", block)
                if not passage:  # the end of a block is too short for one
                    kind = kind if kind != "passage" else "sentence"
                    sentence, *following = block
                    passage = query_of(sentence, rng) if kind == "query" else sentence
                block = following
                digest = _digest(passage)
                if remaining[kind] and digest not in seen:  # a query may be an earlier one, or an excluded phrase
                    seen.add(digest)
                    remaining[kind] -= 1
                    yield kind, passage
        if remaining == before:
            lacking = ", ".join(f"{count:,} {kind}" for kind, count in remaining.items() if count)
            raise CorpusError(f"the corpus has too few sentences: {lacking} are missing; add text or ask for fewer")


def _held_out(
    blocks: Iterator[list[str]], sentences: int, options: TextsOptions, rng: random.Random
) -> tuple[list[tuple[str, str | None]], list[list[str]]]:
    """Held-out passages of a source. From the first ones a sentence is taken out as the query.

    The rest of their blocks is not trained on. From the last block only as many sentences are read as may be held out;
    its other sentences are returned too.
    """
    collection: list[tuple[str, str | None]] = []
    rest: list[list[str]] = []
    remaining = int(sentences * HELD_OUT_SHARE)
    while len(collection) < options.held_out and remaining > 0 and (block := next(blocks, [])):
        rest, block = [block[remaining:]], block[:remaining]
        remaining -= len(block)
        while len(collection) < options.held_out and (length := _length(block, rng)):
            passage, block = block[:length], block[length:]
            if length < FEWEST_SENTENCES:
                continue
            query = None
            if len(collection) < options.held_out_queries:
                sentence = passage.pop(rng.randrange(length))
                query = sentence if len(collection) % 2 else query_of(sentence, rng, FEWEST_WORDS)
            collection.append((" ".join(passage), query))
    return collection, [block for block in rest if block]


def _passage(block: list[str], rng: random.Random) -> tuple[str, list[str]]:
    """The first sentences of a block as a passage (empty if they are too few), and the sentences after it."""
    length = _length(block, rng)
    return " ".join(block[:length]), block[length:]


def _length(block: Sequence[str], rng: random.Random) -> int:
    """How many of the block's first sentences make a passage of a random length; 0 if they are too short."""
    shortest, longest = PASSAGE_WORDS
    target, words = rng.triangular(shortest, longest, shortest), 0
    for number, sentence in enumerate(block):
        words += len(sentence.split())
        if words > longest:
            return 0
        if words >= target:
            return number + 1
    return len(block) if words >= shortest else 0


def bare(text: str) -> str:
    """The words without punctuation, which carries little meaning but changes a vector, followed by a period."""
    words = " ".join(words_of(text)) or text
    return f"{words}."


def query_of(sentence: str, rng: random.Random, fewest: int = 1) -> str:
    """A few consecutive words, `fewest` at least, as someone would type them."""
    words = spaced_words(sentence)
    count = rng.randint(fewest, QUERY_WORDS)
    first = rng.randrange(max(1, len(words) - count + 1))
    query = "".join(words[first : first + count]).strip()
    form = rng.random()
    if form < QUESTION_SHARE:
        return f"{rng.choice(QUESTIONS)} {query}{rng.choice(('', '?', '?'))}"
    return query.strip(" .,;:\"'()") or query if form < QUESTION_SHARE + BARE_SHARE else query


def _digest(text: str) -> int:
    """The digest of the words alone: texts that differ in punctuation or capitals are the same text."""
    words = " ".join(lower_words(text))
    return int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "little")


def _texts_of(path: Path) -> Iterator[str]:
    """A file's lines, their cells, and the strings of JSON objects and of parquet. For a folder, those of all files.

    Raises CorpusError if it does not exist or is not text.
    """
    if not path.exists():
        raise CorpusError(f"--exclude {path} does not exist; give a file or a folder")
    files = files_below(path) if path.is_dir() else [path]
    for file in bar(files, desc="excluding", unit=" files"):
        endings = [suffix.lower() for suffix in file.suffixes]
        if endings[-1:] == [".parquet"]:
            yield from (text for _, record in read_records(file) for text in _strings(record))
            continue
        lines = _lines(file)
        if ".json" in endings:
            yield from _json_strings("".join(lines))
        for line in lines:
            yield from (line, *line.split("\t"), *_json_strings(line))
        if ".csv" in endings:
            for separator in (*SEPARATORS.values(), SEMICOLON):
                for rows in ([line] for line in lines):
                    yield from _cells(rows, separator)
                yield from _cells(lines, separator)  # a quoted cell may have several lines


def _with_sentences(text: str) -> Iterator[str]:
    """A text and its sentences: an excluded document must not be trained on sentence by sentence either."""
    yield text
    yield from (sentence for sentence in SENTENCE_ENDS.split(text) if len(sentence.split()) >= FEWEST_WORDS)


def _lines(file: Path) -> list[str]:
    """Read a text file in UTF-8, or in Latin-1, which some published sets use. Raises CorpusError if it is not text."""
    try:
        return list(read_lines(file))
    except CorpusError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError):
            raise
        content = file.read_bytes()
        if b"\0" in content:
            raise CorpusError(f"--exclude {file} is not text; unpack it, or name other files") from error
        return content.decode("latin-1").splitlines(keepends=True)


def _cells(lines: Sequence[str], separator: str) -> Iterator[str]:
    """Yield the cells of a csv file's lines, up to the first line that is not csv."""
    with suppress(csv.Error):
        for cells in csv.reader(lines, delimiter=separator):
            yield from cells


def _json_strings(line: str) -> list[str]:
    """The strings in a JSON value; none for text that is not JSON."""
    try:
        return _strings(json.loads(line))
    except (ValueError, RecursionError):
        return []


def _strings(value: object) -> list[str]:
    """The strings in objects and lists, at any depth."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [string for item in inner for string in _strings(item)]


def _write_collection(folder: Path, passages: Sequence[tuple[str, str | None]]) -> None:
    """Write the collection in BEIR's layout."""
    folder.mkdir(parents=True)
    queries = [(number, query) for number, (_, query) in enumerate(passages) if query is not None]
    _write(folder / "corpus.jsonl", ({"_id": f"d{n}", "text": passage} for n, (passage, _) in enumerate(passages)))
    _write(folder / "queries.jsonl", ({"_id": f"q{n}", "text": query} for n, query in queries))
    rows = ["query-id\tcorpus-id\tscore", *(f"q{n}\td{n}\t1" for n, _ in queries)]
    (folder / "qrels.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _write(file: Path, records: Iterable[dict[str, str]]) -> None:
    with file.open("w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
