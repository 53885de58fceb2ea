"""Write two collections to search, of text about software that no training set has: packages and docstrings.

    python -m benchmarks.software_collections OUT

`packages`: descriptions of Debian packages, searched by their one-line synopses, from apt's lists. They are there after
`apt-get update -o Acquire::Languages=en`. `docstrings`: docstrings of the Python packages that are installed here,
searched by their first lines. Both go to OUT/retrieval in BEIR's layout, so that
`cloze evaluate MODEL --data OUT --suite retrieval` scores them. They depend on Debian's release and on
constraints.txt: compare only models that were scored on the same files.
"""

import argparse
import ast
import json
import random
import re
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path
from typing import Final

HELPER: Final = "/usr/lib/apt/apt-helper"  # unpacks lists
LISTS: Final = Path("/var/lib/apt/lists")
DOCUMENTS: Final = {"packages": 3000, "docstrings": 2000}
QUERIES: Final = 1000
WORDS: Final = (20, 300)  # of a document
QUERY_WORDS: Final = (3, 15)


def packages() -> Iterator[tuple[str, str]]:
    """Synopsis and description of each package that apt knows in English."""
    for file in sorted(LISTS.glob("*Translation-en*")):
        listed = subprocess.run([HELPER, "cat-file", file], capture_output=True, text=True, check=True)
        for entry in listed.stdout.split("\n\n"):
            _, found, description = entry.partition("Description-en: ")
            synopsis, _, rest = description.partition("\n")
            if found:
                lines = (line.strip() for line in rest.splitlines())
                yield synopsis, " ".join(line for line in lines if line != ".")


def docstrings() -> Iterator[tuple[str, str]]:
    """First line and rest of each docstring of a class or function."""
    for file in sorted(Path(get_path("purelib")).glob("*/**/*.py")):
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                first, _, rest = (ast.get_docstring(node) or "").partition("\n")
                yield first, " ".join(rest.split())


def distinct(pairs: Iterator[tuple[str, str]]) -> dict[str, str]:
    """Synopses and texts of a fitting length, each once: one text for a synopsis, one synopsis for a text."""
    by_text = dict[str, str]()
    for synopsis, text in pairs:
        sizes = len(synopsis.split()), len(re.findall(r"[A-Za-z]+", text))
        if all(low <= size <= high for size, (low, high) in zip(sizes, (QUERY_WORDS, WORDS), strict=True)):
            by_text.setdefault(text, synopsis)
    return {synopsis: text for text, synopsis in by_text.items()}


def write(folder: Path, pairs: dict[str, str], documents: int) -> None:
    chosen = random.Random(0).sample(sorted(pairs.items()), documents)
    folder.mkdir(parents=True)
    with (folder / "corpus.jsonl").open("w") as corpus, (folder / "queries.jsonl").open("w") as queries:
        for number, (synopsis, text) in enumerate(chosen):
            corpus.write(json.dumps({"_id": f"d{number}", "text": text}) + "\n")
            if number < QUERIES:
                queries.write(json.dumps({"_id": f"q{number}", "text": synopsis}) + "\n")
    rows = ["query-id\tcorpus-id\tscore", *(f"q{number}\td{number}\t1" for number in range(QUERIES))]
    (folder / "qrels.tsv").write_text("\n".join(rows) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    for name, pairs in (("packages", packages()), ("docstrings", docstrings())):
        rows = distinct(pairs)
        if len(rows) < DOCUMENTS[name]:
            parser.error(f"{len(rows):,} {name} found, and {DOCUMENTS[name]:,} are needed (see --help)")
        write(out / "retrieval" / name, rows, DOCUMENTS[name])
        print(f"{out}/retrieval/{name}: {DOCUMENTS[name]:,} of {len(rows):,}")


if __name__ == "__main__":
    main()
