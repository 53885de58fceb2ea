"""The repository's text uses plain English: none of the phrases below occurs in a tracked file.

`python tests/test_english.py [FOLDER ...]` lists the phrases found in the given top-level folders and files, or in all.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

EXCLUDED = ("benchmarks/results/", "models/cloze-mini/", "constraints.txt", "LICENSE", "tests/test_english.py")

# Tables that code writes. Their words are checked in the code.
GENERATED = re.compile(r"<!-- (settings|metrics|keys|commands)\b.*?<!-- end of \1 -->", re.DOTALL)

COMPARATIVES = "better|earlier|faster|fewer|greater|higher|larger|later|less|longer|lower|more|slower|smaller|worse"

# Phrase, as a regular expression in which a space also matches the end of a line -> what to write instead.
PHRASES = {
    rf"(?<!there.)\b(is|are|was|were) no (?!one\b|({COMPARATIVES})\b)": "is not a ..., has no ...",
    r"\bno (JSON|HTTP|UTF-8)\b": "not JSON",
    r"\btold\b": "reported, said",
    r"\b(tells?|speaks?) of\b": "describes, reports",
    r"\bat work\b": "in flight, running",
    r"\bof use\b": "useful",
    r"\bspelt\b": "written, formatted",
    r"\bguilty\b": "the input that failed",
    r"\ba line a\b": "one line per ...",
    r"\b(object|one|record|row|sentence|text|key) a line\b": "one ... per line",
    r"\beach with each\b": "every pair",
    r"\b(accepted|answered|page|refused|taken) whole\b": "as a whole, complete",
    r"\bthe others'": "name the owner",
    r"\bas ever\b": "as before, as usual",
    r"\bwhoever\b": "name the person or the program",
    r"\bread-outs?\b": "pooling",
    r"\bread_out\b": "pooling",
    r"\bof like (length|size|kind)\b": "of similar ...",
    r"\b(is|are) not here\b": "is not installed, is missing",
    r"\b(had|has|have) gone\b": "disconnected",
    r"\bwarming it took\b": "seconds spent ...",
    r"\bhow many may be\b": "limit on ...",
    r"\bof training only\b": "used in training only",
    r"\b(learns?|keeps?|knows?) nothing of\b": "say what happens instead",
    r"\bat the door\b": "before it is queued",
    r"\b(thereof|whereof|wherein|whereby|lest|anyhow)\b": "use a common word",
    r"\bclass (Door|Guard|Reading|Prompt|Space|Device|Slow|Late|Invalid|Malformed)\b": "the name in english.md's table",
    r"\bdef (attend|pick|listed)\b": "a name that says what it does",
}

# File -> exact strings in it that are allowed.
ALLOWED = {
    "CHANGELOG.md": ("`read_out` is now `pooling`",),
    "cloze/encoding/bundle.py": ("it called `pooling` `read_out`", '"read_out"'),  # of bundles of version 1
    "tests/encoding/test_bundle.py": ('content["read_out"]',),
    "tests/reference/vectors.py": ("Whoever returns one late",),  # a text whose vector is stored
}


def test_no_phrase_of_the_list_is_used() -> None:
    found = [hit for path in tracked() for hit in hits(path)]
    assert not found, "\n" + "\n".join(found)


def test_every_allowed_string_exists() -> None:
    for path, strings in ALLOWED.items():
        assert all(allowed in (ROOT / path).read_text(encoding="utf-8") for allowed in strings), path


def test_a_phrase_is_found_across_lines_and_standard_english_is_not() -> None:
    def found(*texts: str) -> list[str]:
        return [text for text in texts if any(pattern.search(text) for pattern, _ in patterns())]

    phrases = ["a body that is no JSON", "# the key is\n    # no number", "requests at work", "it is\ntold"]
    assert found(*phrases) == phrases
    assert found("There is no model", "there are\nno keys", "no longer ready", "no faster", "a retold story") == []


@cache
def tracked() -> list[str]:
    """Paths of the tracked files to check."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for path in listed.stdout.splitlines() if not path.startswith(EXCLUDED) and (ROOT / path).is_file()]


@cache
def patterns() -> list[tuple[re.Pattern[str], str]]:
    gap = r"(?:\\s|#)+"  # words may be separated by the end of a line, and the next line may be a comment
    return [
        (re.compile(re.sub(" ", gap, phrase), re.DOTALL | re.IGNORECASE), advice) for phrase, advice in PHRASES.items()
    ]


def hits(path: str) -> Iterator[str]:
    """`file:line: phrase -> advice` for each phrase in one file; nothing for a file that is not text."""
    try:
        text = (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    for allowed in ALLOWED.get(path, ()):
        text = text.replace(allowed, "\n" * allowed.count("\n"))
    text = GENERATED.sub(lambda block: "\n" * block[0].count("\n"), text)
    for pattern, advice in patterns():
        for found in pattern.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path}:{line}: {' '.join(found[0].split())!r} -> {advice}"


def main(tops: Sequence[str]) -> None:
    for path in tracked():
        if not tops or path.split("/")[0] in tops:
            for hit in hits(path):
                print(hit)


if __name__ == "__main__":
    main(sys.argv[1:])
