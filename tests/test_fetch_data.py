"""benchmarks/fetch_data.py against a server on this machine, and its list of digests against the data of the tests."""

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from data_folder import DATA
from patience import PATIENCE

from benchmarks import fetch_data
from benchmarks.fetch_data import (
    COLLECTIONS,
    DIGESTS,
    different,
    expected,
    fetch_collection,
    fetch_senteval,
    main,
    relevant_documents,
)
from cloze.encoding.errors import ClozeError

DOCUMENTS = """.I 1
.T
A first
 title
.A
An Author
.W
 The text
of it.  It has two lines.
.X
1	5	1
.I 2
.W
No title here.
"""
QUERIES = ".I 1\n.W\nWhat is\nfirst?\n.I 2\n.W\nNobody judged this.\n"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which it is served."""
    folder = tmp_path / "site"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def pack(path: Path, files: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_collection_of_glasgow_becomes_one_of_beir(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    contents = dict(zip(COLLECTIONS["cisi"], (DOCUMENTS, QUERIES, "  1   2  0 0.000000\n"), strict=True))
    pack(folder / "cisi" / "cisi.tar.gz", contents)
    fetch_collection(tmp_path, "cisi", address)
    out = tmp_path / "retrieval" / "cisi"
    assert rows(out / "corpus.jsonl") == [
        {"_id": "1", "title": "A first title", "text": "The text of it. It has two lines."},
        {"_id": "2", "title": "", "text": "No title here."},
    ]
    assert rows(out / "queries.jsonl") == [{"_id": "1", "text": "What is first?"}]
    assert (out / "qrels.tsv").read_text() == "query-id\tcorpus-id\tscore\n1\t2\t1\n"


def test_all_is_fetched_and_compared_with_the_digests(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, address = site
    pack(folder / "senteval.tar", {"MR/a.pos": "good"})
    for name, files in COLLECTIONS.items():
        pack(folder / name / f"{name}.tar.gz", dict(zip(files, (DOCUMENTS, QUERIES, "1 2 0 0\n"), strict=True)))
    paths = [
        f"retrieval/{name}/{file}" for name in COLLECTIONS for file in ("corpus.jsonl", "queries.jsonl", "qrels.tsv")
    ]
    paths.append("senteval/downstream/MR/a.pos")
    digests = tmp_path / "digests"
    for name, value in {"SENTEVAL": f"{address}/senteval.tar", "GLASGOW": address, "DIGESTS": digests}.items():
        monkeypatch.setattr(fetch_data, name, value)
    monkeypatch.setattr(sys, "argv", ["fetch_data", str(tmp_path / "data")])
    digests.write_text("".join(f"{'0' * 64}  {path}\n" for path in paths))
    with pytest.raises(
        ClozeError, match="are not the files that Cloze's figures were measured on: retrieval/med/corpus"
    ):
        main()
    digests.write_text(
        "".join(f"{sha256((tmp_path / 'data' / path).read_bytes()).hexdigest()}  {path}\n" for path in paths)
    )
    (tmp_path / "data" / paths[0]).unlink()  # fetched again, and only this collection
    (folder / "senteval.tar").unlink()
    main()
    out = capsys.readouterr().out
    assert "Terms: STS-B" in out
    assert out.splitlines()[-1].startswith(f"not fetched: {tmp_path}/data/corpus")


@pytest.mark.parametrize("text", ["1 0 13 1\n1 0 4 1\n", "01 13  0 0\n 01 0004  0 0\n", "1 13 0 0.0\n1 4 0 0.0\n"])
def test_judgements_are_read_in_the_three_formats(text: str) -> None:
    assert relevant_documents(text) == {(1, 13), (1, 4)}


def test_the_archive_is_unpacked_from_any_folder(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    pack(folder / "senteval.tar", {"./data/MR/a.pos": "good", "./data/STS/x/a.pos": "pairs", "./../evil": "no"})
    paths = ["senteval/downstream/MR/a.pos", "senteval/downstream/STS/x/a.pos"]
    fetch_senteval(tmp_path, paths, f"{address}/senteval.tar")
    assert [(tmp_path / path).read_text() for path in paths] == ["good", "pairs"]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"senteval.tar", "a.pos"}


def test_what_an_archive_lacks_is_named(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    pack(folder / "senteval.tar", {"MR/a.pos": "good"})
    with pytest.raises(ClozeError, match=r"senteval\.tar has no CR/a\.pos$"):
        fetch_senteval(tmp_path, ["senteval/downstream/CR/a.pos"], f"{address}/senteval.tar")
    pack(folder / "med" / "med.tar.gz", {"MED.ALL": DOCUMENTS})
    with pytest.raises(ClozeError, match=r"med\.tar\.gz has no MED\.QRY, MED\.REL$"):
        fetch_collection(tmp_path, "med", address)
    with pytest.raises(ClozeError, match=r"cacm\.tar\.gz cannot be fetched .*404") as found:
        fetch_collection(tmp_path, "cacm", address)
    assert "\n" not in str(found.value)
    (folder / "cisi").mkdir()
    (folder / "cisi" / "cisi.tar.gz").write_text("<html>Sign in first</html>")
    with pytest.raises(ClozeError, match=r"cisi\.tar\.gz is not a whole tar archive"):
        fetch_collection(tmp_path, "cisi", address)


def test_without_a_network_it_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.fetch_data", str(tmp_path / "data")]
    proxy = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=DIGESTS.parents[1], env=proxy, timeout=PATIENCE)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert all(f"{name}.tar" in done.stderr for name in ("senteval", "med", "cisi", "cacm"))
    assert not (tmp_path / "data").exists()


@pytest.mark.skipif(not DATA.is_dir(), reason="The public data are not there")
def test_the_digests_are_those_of_the_data_of_the_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So nothing is fetched where they are."""
    assert different(DATA, expected(DIGESTS)) == []
    monkeypatch.setattr(sys, "argv", ["fetch_data", str(DATA)])
    main()
    assert capsys.readouterr().out.startswith("Terms: ")


def test_a_folder_that_cannot_be_written_to_is_one_line(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    pack(folder / "senteval.tar", {"MR/a.pos": "good"})
    (tmp_path / "file").write_text("")
    with pytest.raises(ClozeError, match=r"a\.pos cannot be written \(Not a directory\); give another folder"):
        fetch_senteval(tmp_path / "file", ["senteval/downstream/MR/a.pos"], f"{address}/senteval.tar")


def test_a_file_that_differs_is_named(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(f"{'0' * 64}  retrieval/med/qrels.tsv\n")
    (tmp_path / "retrieval" / "med").mkdir(parents=True)
    (tmp_path / "retrieval" / "med" / "qrels.tsv").write_text("1\t2\t1\n")
    assert different(tmp_path, expected(tmp_path / "list")) == ["retrieval/med/qrels.tsv"]
