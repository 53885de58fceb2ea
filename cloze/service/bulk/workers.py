"""How many workers the nodes of a Ray cluster have room for.

A cluster that scales up may have no node for a worker yet: the job asks for one and waits.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Final

import ray

from cloze.encoding.errors import OptionError

MOST_CPUS: Final = 4  # of a worker, if not given
WAIT_SECONDS: Final = 600.0  # starting a machine and its container takes minutes
POLL_SECONDS: Final = 1.0

Node = dict[str, float]  # the amount of each resource on a node


@dataclass(frozen=True)
class Resources:
    """The resources of one actor, the number of actors at first, and the most if the cluster grows."""

    cpus: int
    gpus: float
    actors: int
    max_actors: int | None


def resources(cpus: int, gpus: float, max_actors: int, *, wait: bool) -> Resources:
    """Share the cluster between actors. 0 CPUs means those of the smallest node, at most 4; 0 actors means any number.

    Nodes with less than one CPU have no workers. If no node has room for one, `wait` asks the cluster for such a node
    and waits for it. Raises OptionError if there is still none.
    """
    nodes = _nodes()
    if wait and not _room(nodes, cpus, gpus):
        nodes = _wait(nodes, cpus, gpus)
    room = _room(nodes, cpus, gpus)
    if not room:
        raise OptionError(
            f"{_shortage(nodes, cpus, gpus)}: ask for less with --worker-cpus or --worker-gpus, or add a larger node"
        )
    return Resources(_cpus(nodes, cpus), gpus, min(room, max_actors or room), max_actors or None)


def _nodes() -> list[Node]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _cpus(nodes: list[Node], cpus: int) -> int:
    """Return the CPUs of a worker; by default those of the smallest node that has at least one."""
    return cpus or min([MOST_CPUS, *(int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1)])


def _room(nodes: list[Node], cpus: int, gpus: float) -> int:
    """Return how many workers fit on the nodes."""
    cpus = _cpus(nodes, cpus)
    return sum(
        min(int(node.get("CPU", 0) / cpus), int(node.get("GPU", 0) / gpus) if gpus else sys.maxsize) for node in nodes
    )


def _shortage(nodes: list[Node], cpus: int, gpus: float) -> str:
    counts = Counter(_size(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes)
    sizes = "; ".join(f"{count} x {size}" if count > 1 else size for size, count in counts.items())
    has = f"the nodes have {sizes}" if nodes else "no node is alive"
    return f"no node has {_size(cpus or 1, gpus)}; {has}"


def _size(cpus: float, gpus: float) -> str:
    return " and ".join(f"{n:g} {name}{'s' * (n != 1)}" for n, name in ((cpus, "CPU"), (gpus, "GPU")))


def _wait(nodes: list[Node], cpus: int, gpus: float) -> list[Node]:
    """Return the nodes once a worker fits, or after WAIT_SECONDS."""
    shortage, limit = _shortage(nodes, cpus, gpus), f"{WAIT_SECONDS:g} s"
    print(f"{shortage}; waiting at most {limit} for the cluster to start one", file=sys.stderr)
    demand = ray.remote(num_cpus=cpus or 1, num_gpus=gpus)(lambda: None).remote()  # an autoscaler sees it
    end = monotonic() + WAIT_SECONDS
    try:
        while not _room(nodes, cpus, gpus) and monotonic() < end:
            sleep(POLL_SECONDS)
            nodes = _nodes()
    finally:
        ray.cancel(demand)
    return nodes
