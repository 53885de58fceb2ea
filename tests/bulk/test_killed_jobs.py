"""Jobs whose driver, workers or node are killed at any moment."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from harness import PATIENCE, wait_until
from jobs import MOMENTS, PARTS, PER_FILE, check_same, complete, let, run, start

pytestmark = [pytest.mark.long, pytest.mark.ray]
pytest.importorskip("ray")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_driver_goes_on_where_it_was(
    texts: Path, bundle: Path, undisturbed: pa.Table, tmp_path: Path, moment: int
) -> None:
    out = tmp_path / "out"
    with start(texts, out, bundle, moment) as process:
        wait_until(lambda: (out / "job.json").exists() and complete(out) == moment)
        process.kill()
    found = run(texts, out, bundle)  # at once, while the workers of the first driver end
    assert found.returncode == 0, found.stderr
    if moment:
        assert f"{moment * PER_FILE} rows already had vectors from an earlier start" in found.stdout
    check_same(out, undisturbed)


def test_a_killed_worker_is_replaced(texts: Path, bundle: Path, undisturbed: pa.Table, tmp_path: Path) -> None:
    out, moment = tmp_path / "out", MOMENTS[1]
    with start(texts, out, bundle, moment) as process:
        wait_until(lambda: workers(process.pid) and complete(out) == moment)
        for worker in workers(process.pid):
            worker.kill()
        let(out, 2 * PARTS)  # the tickets of those that were killed are lost
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    check_same(out, undisturbed)


def workers(driver: int) -> list[psutil.Process]:
    """The actors that embed."""
    found = []
    for child in psutil.Process(driver).children(recursive=True):
        try:
            found += [child] if "_Embedder" in " ".join(child.cmdline()) else []
        except psutil.Error:
            continue
    return found


@pytest.fixture
def cluster() -> Iterator[object]:
    """Two nodes on this machine; the driver is a process of its own."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves its log files open
def test_a_lost_node_is_done_without(
    cluster: object, texts: Path, bundle: Path, undisturbed: pa.Table, tmp_path: Path
) -> None:
    out, moment = tmp_path / "out", MOMENTS[1]
    with start(texts, out, bundle, moment, "--address", cluster.address) as process:  # type: ignore[attr-defined]
        wait_until(lambda: (out / "job.json").exists() and complete(out) == moment)
        node = next(iter(cluster.worker_nodes))  # type: ignore[attr-defined]
        raylet = node.all_processes["raylet"][0].process.pid
        for child in psutil.Process(raylet).children(recursive=True):
            child.kill()
        os.kill(raylet, signal.SIGKILL)
        let(out, 2 * PARTS)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    check_same(out, undisturbed)
