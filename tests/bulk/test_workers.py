"""How many workers fit on the nodes of a cluster, and the wait for a node that is not there yet."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from cloze.encoding.errors import OptionError
from cloze.service.bulk import workers
from cloze.service.bulk.workers import Resources, resources

HEAD: dict[str, float] = {"memory": 1e9}  # of KubeRay: it has no CPUs for tasks


class FakeRay(SimpleNamespace):
    """Ray with the nodes that it has now, and those that it has after a task asked for one."""

    def __init__(self, now: list[dict[str, float]], later: list[dict[str, float]] | None = None) -> None:
        super().__init__(found=now, later=now if later is None else later, asked=[], cancelled=[])

    def nodes(self) -> list[dict[str, Any]]:
        lost = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}
        return [lost, *({"Alive": True, "Resources": node} for node in self.found)]

    def remote(self, **options: float) -> Any:
        return lambda task: SimpleNamespace(remote=lambda: self.ask(options))

    def ask(self, options: dict[str, float]) -> str:
        self.asked.append(options)
        self.found = self.later
        return "task"

    def cancel(self, task: str) -> None:
        self.cancelled.append(task)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "POLL_SECONDS", 0)


def test_workers_that_fit(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    for nodes, asked, expected in [
        ([{"CPU": 16.0}], (0, 0, 0), Resources(4, 0, 4, None)),
        ([{"CPU": 16.0}], (0, 0, 3), Resources(4, 0, 3, 3)),
        ([{"CPU": 16.0}], (6, 0, 9), Resources(6, 0, 2, 9)),
        ([{"CPU": 16.0}, {"CPU": 3.0}], (0, 0, 0), Resources(3, 0, 6, None)),
        ([{"CPU": 2.5}], (0, 0, 0), Resources(2, 0, 1, None)),
        ([HEAD, {"CPU": 2.0}], (0, 0, 0), Resources(2, 0, 1, None)),
        ([{"CPU": 0.5}, {"CPU": 2.0}], (0, 0, 0), Resources(2, 0, 1, None)),
        ([{"CPU": 0.5}, {"CPU": 2.0}], (1, 0, 0), Resources(1, 0, 2, None)),
        ([{"CPU": 8.0}, {"CPU": 8.0, "GPU": 1.0}], (1, 0.25, 0), Resources(1, 0.25, 4, None)),
        ([{"CPU": 2.0, "GPU": 4.0}], (1, 1, 0), Resources(1, 1, 2, None)),
    ]:
        with subtests.test(nodes=nodes):
            ray = FakeRay(nodes)
            monkeypatch.setattr(workers, "ray", ray)
            assert resources(*asked, wait=True) == resources(*asked, wait=False) == expected
            assert ray.asked == []


@pytest.mark.parametrize(
    ("nodes", "asked", "message"),
    [
        ([], (0, 0, 0), "no node has 1 CPU and 0 GPUs; no node is alive: ask for less with --worker-cpus or"),
        ([HEAD], (0, 0, 0), "no node has 1 CPU and 0 GPUs; the nodes have 0 CPUs and 0 GPUs: ask for less"),
        ([{"CPU": 0.5}], (0, 0, 0), "no node has 1 CPU and 0 GPUs; the nodes have 0.5 CPUs and 0 GPUs"),
        (
            [{"CPU": 8.0, "GPU": 1.0}] * 2,
            (9, 0, 0),
            "9 CPUs and 0 GPUs; the nodes have 2 x 8 CPUs and 1 GPU:",
        ),
        ([HEAD, {"CPU": 8.0}], (0, 0.5, 0), "and 0.5 GPUs; the nodes have 0 CPUs and 0 GPUs; 8 CPUs and 0 GPUs"),
    ],
)
def test_no_worker_fits(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nodes: list[dict[str, float]],
    asked: Any,
    message: str,
) -> None:
    monkeypatch.setattr(workers, "ray", FakeRay(nodes))
    with pytest.raises(OptionError, match=message):
        resources(*asked, wait=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(workers, "WAIT_SECONDS", 0.01)
    with pytest.raises(OptionError, match=message):
        resources(*asked, wait=True)
    assert "; waiting at most 0.01 s for the cluster to start one\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "demand", "expected"),
    [
        ((0, 0, 0), {"num_cpus": 1, "num_gpus": 0}, Resources(2, 0, 1, None)),
        ((2, 0, 5), {"num_cpus": 2, "num_gpus": 0}, Resources(2, 0, 1, 5)),
        ((0, 0.5, 0), {"num_cpus": 1, "num_gpus": 0.5}, Resources(2, 0.5, 1, None)),
    ],
)
def test_a_cluster_is_asked_for_a_node(
    monkeypatch: pytest.MonkeyPatch, asked: Any, demand: dict[str, float], expected: Resources
) -> None:
    ray = FakeRay([HEAD], later=[HEAD, {"CPU": 2.0, "GPU": 1.0}])
    monkeypatch.setattr(workers, "ray", ray)
    assert resources(*asked, wait=True) == expected
    assert (ray.asked, ray.cancelled) == ([demand], ["task"])
