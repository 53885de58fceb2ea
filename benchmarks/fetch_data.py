"""python -m benchmarks.fetch_data FOLDER: fetch public evaluation data from where their authors publish them.

    senteval/downstream    what SimCSE's authors made with SentEval's script: STS, SICK-R, seven tasks to classify
    retrieval/             med, cisi and cacm of the University of Glasgow's collections, in BEIR's layout

Files that are there stay as they are. benchmarks/data.sha256 has the digests of the files that Cloze's figures were
measured on, in the format of sha256sum; a file that differs from them is an error, once all are there.
"""

import io
import json
import re
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

import httpx
from tqdm import tqdm

from cloze.command import run
from cloze.encoding.bundle import sha256
from cloze.encoding.errors import ClozeError
from cloze.encoding.files import replacing

SENTEVAL: Final = "https://huggingface.co/datasets/princeton-nlp/datasets-for-simcse/resolve/main/senteval.tar"
GLASGOW: Final = "http://ir.dcs.gla.ac.uk/resources/test_collections"
COLLECTIONS: Final = {  # name: its documents, queries and judgements in the archive
    "med": ("MED.ALL", "MED.QRY", "MED.REL"),
    "cisi": ("CISI.ALL", "CISI.QRY", "CISI.REL"),
    "cacm": ("cacm.all", "query.text", "qrels.text"),
}
DIGESTS: Final = Path(__file__).with_name("data.sha256")
TERMS: Final = """Terms: STS-B's scores CC BY-SA 4.0; SICK CC BY-NC-SA 3.0; MRPC and MSRpar Microsoft Research's; MR,
CR, SUBJ and MPQA academic use; med, cisi and cacm research. Evaluate with them, and do not distribute them."""
MISSING: Final = (
    "not fetched: {folder}/corpus, sentences to train on, which has no public address; "
    "any text file with one sentence per line takes its place"
)


def main() -> None:
    """Raises ClozeError."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise ClozeError("give one folder: python -m benchmarks.fetch_data FOLDER")
    folder = Path(sys.argv[1])
    listed = expected(DIGESTS)
    senteval = [path for path in listed if path.startswith("senteval/")]
    absent = [path for path in listed if not (folder / path).is_file()]
    names = [name for name in COLLECTIONS if any(f"/{name}/" in path for path in absent)]
    sources = [partial(fetch_collection, folder, name, GLASGOW) for name in names]
    if not set(absent).isdisjoint(senteval):
        sources.insert(0, partial(fetch_senteval, folder, senteval, SENTEVAL))
    failures = []
    for fetch in sources:  # one that cannot be reached does not stop the others
        try:
            fetch()
        except ClozeError as error:
            failures.append(str(error))
    print(TERMS)
    if failures:
        raise ClozeError("; ".join(failures) + "; the same command later fetches what is missing")
    if others := different(folder, listed):
        raise ClozeError(
            f"these are not the files that Cloze's figures were measured on: {', '.join(others)}; figures may differ. "
            "Delete them to fetch them again"
        )
    if not (folder / "corpus").is_dir():
        print(MISSING.format(folder=folder))


def fetch_senteval(folder: Path, paths: list[str], address: str) -> None:
    """Unpack the files of `paths`, senteval/downstream/..., whatever folder of the archive they are in."""
    wanted = {PurePosixPath(path).parts[2:]: path for path in paths}
    longest = max(map(len, wanted))
    with opened(address) as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts
            path = next((wanted.pop(parts[-n:]) for n in range(longest, 0, -1) if parts[-n:] in wanted), None)
            content = archive.extractfile(member) if path else None
            if path and content:
                write(folder / path, content.read())
    if wanted:
        raise ClozeError(f"{address} has no {', '.join(sorted('/'.join(parts) for parts in wanted))}")


def fetch_collection(folder: Path, name: str, address: str) -> None:
    """Write one of Glasgow's collections in BEIR's layout: documents, judged queries, and judgements."""
    url = f"{address}/{name}/{name}.tar.gz"
    with opened(url) as archive:
        members = {PurePosixPath(member.name).name: member for member in archive if member.isfile()}
        if absent := [file_name for file_name in COLLECTIONS[name] if file_name not in members]:
            raise ClozeError(f"{url} has no {', '.join(absent)}")
        files = [archive.extractfile(members[file_name]) for file_name in COLLECTIONS[name]]
        documents, queries, judgements = (file.read().decode("latin-1") for file in files if file)
    relevant = sorted(relevant_documents(judgements))
    judged = {query for query, _ in relevant}
    corpus = [
        {"_id": number, "title": fields.get("T", ""), "text": fields.get("W", "")}
        for number, fields in records(documents)
    ]
    judged_queries = [
        {"_id": number, "text": fields["W"]} for number, fields in records(queries) if int(number) in judged
    ]
    rows = [f"{query}\t{document}\t1" for query, document in relevant]
    out = folder / "retrieval" / name
    write(out / "corpus.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in corpus).encode())
    write(out / "queries.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in judged_queries).encode())
    write(out / "qrels.tsv", "\n".join(["query-id\tcorpus-id\tscore", *rows, ""]).encode())


def records(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The records of a file in SMART's format: `.I NUMBER`, then fields that begin with a line such as `.T` or `.W`."""
    for record in re.split(r"^\.I ", text, flags=re.MULTILINE)[1:]:
        number, _, rest = record.partition("\n")
        parts = re.split(r"^\.([A-Z])[ \t]*$", rest, flags=re.MULTILINE)[1:]
        yield (
            number.strip(),
            {name: " ".join(value.split()) for name, value in zip(parts[::2], parts[1::2], strict=True)},
        )


def relevant_documents(text: str) -> set[tuple[int, int]]:
    """Queries and documents of a file of judgements, which has either `query document ...` or `query 0 document 1`."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    trec = all(len(row) == 4 and row[1] == "0" and row[3] == "1" for row in rows)
    return {(int(row[0]), int(row[2 if trec else 1])) for row in rows}


@contextmanager
def opened(address: str) -> Iterator[tarfile.TarFile]:
    """The archive at an address. Raises ClozeError."""
    content = download(address)
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            yield archive
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ClozeError(f"{address} is not a whole tar archive ({error})") from error


def download(address: str) -> bytes:
    """The content at an address. Raises ClozeError."""
    try:
        with httpx.stream("GET", address, follow_redirects=True, timeout=60) as response:
            response.raise_for_status()
            size = int(response.headers.get("content-length", 0)) or None
            with tqdm(total=size, unit="B", unit_scale=True, desc=address.rpartition("/")[2]) as bar:
                pieces = []
                for piece in response.iter_bytes():
                    pieces.append(piece)
                    bar.update(len(piece))
        return b"".join(pieces)
    except httpx.HTTPError as error:
        raise ClozeError(f"{address} cannot be fetched ({str(error).partition(chr(10))[0]})") from error


def write(path: Path, content: bytes) -> None:
    """Raises ClozeError where the folder cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise ClozeError(f"{path} cannot be written ({error.strerror}); give another folder") from error


def expected(file: Path) -> dict[str, str]:
    """Path -> digest, of a file that sha256sum wrote."""
    rows = (line.split(maxsplit=1) for line in file.read_text(encoding="utf-8").splitlines())
    return {path.strip(): digest for digest, path in rows}


def different(folder: Path, listed: dict[str, str]) -> list[str]:
    return [path for path, digest in listed.items() if sha256(folder / path) != digest]


if __name__ == "__main__":
    sys.exit(run(main))
