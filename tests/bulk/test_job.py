"""Whole jobs under Ray: the command, its exit statuses and what it says."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import PATIENCE, wait_until
from jobs import PARTS, PER_FILE, check_same, command, complete, let, run, start, vectors
from live import metrics, served
from tiny_bundle import write_bundle

from benchmarks.readme import MODEL
from cloze.service.app import create_app
from cloze.service.settings import Settings

pytestmark = [pytest.mark.long, pytest.mark.ray]
pytest.importorskip("ray")


def test_a_job_that_began_here_may_go_on_through_a_service(
    texts: Path, bundle: Path, undisturbed: pa.Table, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with start(texts, out, bundle, 3) as process:
        wait_until(lambda: complete(out) == 3)
        process.kill()
    with served(create_app(Settings(bundle=bundle, provider="cpu", threads=1))) as url:
        found = run(texts, out, bundle, "--precision", "auto", "--server", url)
        assert metrics(url)["cloze_request_seconds_count{priority=bulk,route=/embed}"] >= PARTS - 3
    assert found.returncode == 0, found.stderr
    assert f"{3 * PER_FILE} rows already had vectors from an earlier start" in found.stdout
    check_same(out, undisturbed)


def test_a_second_job_is_refused_and_the_first_one_goes_on(
    texts: Path, bundle: Path, undisturbed: pa.Table, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with start(texts, out, bundle, 1) as process:
        wait_until(lambda: complete(out))
        for options in ([], ["--dtype", "int8"]):
            found = run(texts, out, bundle, *options)
            assert found.returncode == 2
            assert f"error: {out} is being written by another job, process {process.pid} on " in found.stderr
        let(out, PARTS)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    check_same(out, undisturbed)


def test_an_interrupted_job_releases_its_lock(texts: Path, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start(texts, out, bundle, 1) as process:
        wait_until(lambda: complete(out))
        assert (out / "job.lock").exists()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert not (out / "job.lock").exists()


@pytest.fixture
def empty_cluster() -> Iterator[object]:
    """A head without CPUs, as KubeRay starts it."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_job_waits_for_the_first_node(empty_cluster: object, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a man\n")
    address = empty_cluster.address  # type: ignore[attr-defined]
    words = command(tmp_path / "texts.txt", tmp_path / "out", bundle, "--address", address)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: demand(address) or process.poll() is not None)
        assert demand(address) == [{"CPU": 1}]
        empty_cluster.add_node(num_cpus=1)  # type: ignore[attr-defined]
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "no node has 1 CPU and 0 GPUs; the nodes have 0 CPUs and 0 GPUs; waiting at most 600 s for" in errors
    assert len(vectors(tmp_path / "out")) == 1


def demand(address: str) -> list[dict[str, float]]:
    """What an autoscaler sees: the resources of each kind of task that fits on no node."""
    from ray._raylet import GcsClient
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    state = get_cluster_resource_state(GcsClient(address=address))
    return [dict(each.request.resources_bundle) for each in state.pending_resource_requests]


def test_rows_that_fail_are_named_and_the_exit_status_says_so(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_bytes(
        b'{"text": "a man"}\n{\n{"text": "poison"}\n{"text": null}\n{"text": "dogs"}\n'
    )
    for again in (False, True):
        found = run(tmp_path / "texts.jsonl", tmp_path / "out", bundle)
        assert found.returncode == 3, found.stderr
        assert "3 rows have no vector" in found.stdout
        assert ("2 rows already had vectors from an earlier start" in found.stdout) == again
    errors = pq.read_table(tmp_path / "out" / "errors").to_pylist()
    assert [row["id"] for row in errors] == ["texts.jsonl:2", "texts.jsonl:3", "texts.jsonl:4"]
    assert len(vectors(tmp_path / "out")) == 2


def test_a_check_says_what_is_missing_and_embeds_nothing(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a man\n" * 25)
    (tmp_path / "b.jsonl").write_text('{"text": "two dogs"}\n' * 12 + '{"text": "poison"}\n')
    source, out = [tmp_path / "[ab].*", tmp_path / "out"]
    options = ["--rows-per-file", "10"]
    none = run(source, out, bundle, *options, "--check")
    assert (none.returncode, out.exists()) == (2, False)
    assert "has no job to check; start one without --check" in none.stderr
    assert run(source, out, bundle, *options).returncode == 3
    whole = run(source, out, bundle, *options, "--check")
    assert (whole.returncode, whole.stdout) == (
        3, "37 rows have vectors, 1 failed permanently, 0 are still to be embedded\n",
    )  # fmt: skip
    [lost] = (out / "vectors").glob("00000-*/part-000001.parquet")
    lost.unlink()
    part = run(source, out, bundle, *options, "--check")
    assert (part.returncode, part.stdout) == (
        1, "27 rows have vectors, 1 failed permanently, 10 are still to be embedded\n",
    )  # fmt: skip
    assert not lost.exists()
    other = run(source, out, bundle, *options, "--dimensions", "4", "--check")
    assert other.returncode == 2
    assert "was started with dimensions None, but dimensions is now 4" in other.stderr


def test_a_bundle_without_the_graph_of_the_job_is_refused(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a man\n")
    assert run(tmp_path / "a.txt", tmp_path / "out", bundle).returncode == 0
    other = write_bundle(tmp_path / "other", precisions=("fp16",))
    for more in ([], ["--check"]):
        refused = run(tmp_path / "a.txt", tmp_path / "out", other, "--precision", "auto", *more)
        assert refused.returncode == 2
        assert "was started with model" in refused.stderr


def test_a_file_that_breaks_ends_the_job_with_one_line(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a man\n" * 200)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "b.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:-9])
    found = run(tmp_path, tmp_path / "out", bundle)
    assert found.returncode == 2
    assert re.search(r"^error: .*b\.parquet cannot be read: ", found.stderr, re.MULTILINE)
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text-column", "words"], "there is no column 'words'; the columns are text"),
        (["--worker-cpus", "99"], "no node has 99 CPUs and 0 GPUs; the nodes have "),
        (["--address", "127.0.0.1:1"], "Ray cannot be reached at 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_one_line(bundle: Path, tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "texts.txt").write_text("a man\n")
    found = run(tmp_path / "texts.txt", tmp_path / "out", bundle, *options)
    assert found.returncode == 2
    *_, last = found.stderr.splitlines()
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_int8_is_not_given_to_a_gpu(precision: str, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a man\n")
    options = ["--worker-gpus", "1", "--precision", precision]
    found = run(tmp_path / "texts.txt", tmp_path / "out", MODEL, *options)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(
        "error: --worker-gpus: CUDA has no kernel for the matrix products of int8; make a bundle in "
    )


def test_a_bundle_that_a_worker_cannot_load_ends_the_job_with_one_line(bundle: Path, tmp_path: Path) -> None:
    """As on a node that lacks it."""
    (tmp_path / "texts.txt").write_text("a man\n")
    script = f"""
import sys
from functools import partial
from cloze.command import run
from cloze.service.bulk import job
from cloze.service.bulk.embed import Embed
from cloze.service.bulk.output import Output
from cloze.service.bulk.source import Source
from cloze.service.bulk.workers import Resources

def start():
    source, output = Source.find({str(tmp_path / "texts.txt")!r}), Output.at({str(tmp_path / "out")!r}, 9)
    with job.connection(None):
        list(job.run(partial(Embed, "/no-such-bundle"), source, output, Resources(1, 0, 1, 1), []))

sys.exit(run(start))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert (found.returncode, found.stdout) == (2, "")
    assert re.match(r"error: /no-such-bundle is not a folder; ", found.stderr.splitlines()[-1])
    assert "Traceback" not in found.stderr


def test_nothing_is_written_to_the_home_folder(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of Ray's there would close clusters that are started later to jobs of the same user."""
    (tmp_path / "texts.txt").write_text("a man\n")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = run(tmp_path / "texts.txt", tmp_path / "out", bundle)
    assert found.returncode == 0, found.stderr
    assert not list((tmp_path / "home").rglob("*"))
