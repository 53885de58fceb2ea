"""Compare the speed of Cloze, infinity and sentence-transformers on the same weights and texts.

    python -m benchmarks.serving --parent MODEL --data DATA [--infinity PYTHON] [--encoders PYTHON …] [--quick]

MODEL is a folder of all-MiniLM-L6-v2. Cloze serves it as a bundle made by this command, in fp32 and int8, without a
template. `--infinity` is the Python interpreter of an environment with infinity-emb[server,torch,optimum]; both of its
engines are then measured. `--encoders` are the interpreters of environments with sentence-transformers and its onnx or
openvino backend. Without these options, Cloze is compared with sentence-transformers in torch only.

First, the vectors of every contender are compared with those of torch. Then three rounds are measured: short texts, one
per request; mixed texts, 32 per request; long texts, eight per request; each over 1, 8, 32 and 128 connections.
sentence-transformers runs in process, without connections, and is compared with the highest throughput. Ratios are
computed for each round. The command writes benchmarks/results/serving.json and serving.svg and prints the tables.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import InProcess, Peer, Raw, Server, bundle_of, infinity, model_with_onnx, ours
from benchmarks.serving_report import draw, tables
from encoding.bundle import Precision
from encoding.machine import available_cpus, processor, versions
from evaluation.search import find_collections, load_collection
from evaluation.sts import load_pairs, spearman

RESULTS: Final = Path(__file__).parent / "results" / "serving.json"
PACKAGES: Final = ("onnxruntime", "tokenizers", "numpy", "fastapi", "uvicorn", "torch", "sentence-transformers")
CONNECTIONS: Final = (1, 8, 32, 128)
QUICK: Final = (1, 32)
ROUNDS: Final = 3
CHECKED: Final = 100  # texts whose vectors are compared
OURS: Final[dict[str, Precision]] = {"Cloze, int8": "int8", "Cloze, fp32": "fp32"}


@dataclass(frozen=True)
class Workload:
    """Texts, and the number of texts in one request."""

    texts: list[str]
    texts_per_request: int

    def requests(self, connections: int) -> list[list[str]]:
        """Requests of this workload; over one connection only a quarter of the texts is sent."""
        texts = self.texts[: len(self.texts) // 4] if connections == 1 else self.texts
        return [texts[first : first + self.texts_per_request] for first in range(0, len(texts), self.texts_per_request)]


@dataclass(frozen=True)
class Figures:
    """One contender's result for one workload, number of connections and round. Times are seconds."""

    texts_per_second: float
    p50: float
    p99: float
    cpu: float  # CPU seconds of the contender's processes, for all texts


def workloads(data: Path, share: int) -> dict[str, Workload]:
    """Different sentences of STS-B dev and documents of the retrieval collections; 1/`share` of each."""
    pairs = load_pairs(data / "senteval/downstream/STS/STSBenchmark/sts-dev.csv")
    sentences = sorted({*pairs.left, *pairs.right})
    documents = [text for folder in find_collections(data) for text in load_collection(folder).documents]
    draw = np.random.default_rng(0)
    draw.shuffle(sentences)
    draw.shuffle(documents)
    short = [text for text in sentences if len(text.split()) <= 12]
    mixed = [*sentences[:1440], *documents[:160]]
    draw.shuffle(mixed)
    return {
        "short, 1 per request": Workload(short[: 800 // share], 1),
        "mixed, 32 per request": Workload(mixed[: 1600 // share], 32),
        "long, 8 per request": Workload(documents[160 : 160 + 160 // share], 8),
    }


async def ask(server: Server, requests: Sequence[bytes], connections: int) -> tuple[list[bytes], list[float]]:
    """The response bodies, in order, and the seconds of each. This simple client leaves most CPU time to the server."""
    bodies, seconds = [b""] * len(requests), [0.0] * len(requests)
    turns = iter(range(len(requests)))

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for place in turns:
            began = time.perf_counter()
            writer.write(requests[place])
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            bodies[place] = await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
            seconds[place] = time.perf_counter() - began
        writer.close()

    await asyncio.gather(*(work() for _ in range(min(connections, len(requests)))))
    return bodies, seconds


def serve(server: Server, workload: Workload, connections: int) -> Figures:
    texts = workload.requests(connections)
    requests = [server.request(each) for each in texts]
    cpu, began = server.cpu_seconds, time.perf_counter()
    _, seconds = asyncio.run(ask(server, requests, connections))
    took = time.perf_counter() - began
    p50, p99 = np.percentile(seconds, [50, 99])
    return Figures(sum(map(len, texts)) / took, float(p50), float(p99), server.cpu_seconds - cpu)


def vectors(peer: Peer, texts: Sequence[str]) -> NDArray[np.float64]:
    """The texts' vectors, normalised to length 1."""
    if isinstance(peer, InProcess):
        rows = peer.encode(texts)[1]
    else:
        assert isinstance(peer, Server)
        parts = [texts[first : first + 32] for first in range(0, len(texts), 32)]
        bodies, _ = asyncio.run(ask(peer, [peer.request(part) for part in parts], 4))
        rows = np.array([row["embedding"] for body in bodies for row in json.loads(body)["data"]], dtype=np.float32)
    return rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)


def accuracy(peers: Mapping[str, Peer], data: Path) -> dict[str, dict[str, float]]:
    """Cosines with torch's vectors, and Spearman's correlation x 100 on STS-B dev."""
    pairs = load_pairs(data / "senteval/downstream/STS/STSBenchmark/sts-dev.csv")
    expected: NDArray[np.float64] | None = None
    found = {}
    for name, peer in peers.items():
        with peer.resumed():
            checked = vectors(peer, pairs.left[:CHECKED])
            score = spearman(partial(vectors, peer), pairs)
        expected = checked if expected is None else expected
        cosines = (checked * expected).sum(axis=1)
        found[name] = {"least": float(cosines.min()), "mean": float(cosines.mean()), "STS-B dev": float(score)}
        print(f"{name}: {found[name]}", flush=True)
    return found


def measure(
    peers: Mapping[str, Peer], raws: Mapping[str, Raw], work: Mapping[str, Workload], levels: Sequence[int], rounds: int
) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """Figures by workload, number of connections (or "in process"), contender and round."""
    found: dict[str, dict[str, dict[str, list[Any]]]] = {name: {} for name in work}

    def note(name: str, level: str, contender: str, figures: Figures) -> None:
        found[name].setdefault(level, {}).setdefault(contender, []).append(asdict(figures))

    for number in range(rounds):
        for name, workload in work.items():
            print(f"round {number + 1}: {name}", flush=True)
            for contender, peer in peers.items():
                with peer.resumed():
                    if isinstance(peer, Server):
                        for level in levels:
                            note(name, str(level), contender, serve(peer, workload, level))
                    elif isinstance(peer, InProcess):
                        cpu = peer.cpu_seconds
                        seconds, _ = peer.encode(workload.texts)
                        rate = len(workload.texts) / seconds
                        note(name, "in process", contender, Figures(rate, seconds, seconds, peer.cpu_seconds - cpu))
            for contender, raw in raws.items():
                seconds, cpu = raw.encode(workload.texts)
                note(name, "in process", contender, Figures(len(workload.texts) / seconds, seconds, seconds, cpu))
    return found


def makers(options: argparse.Namespace, model: Path, bundle: Path) -> Iterator[tuple[str, Callable[[], Peer]]]:
    """How each contender is started, torch first. The folder `model` also contains model.onnx."""
    yield "sentence-transformers, torch", partial(InProcess, sys.executable, options.parent, "torch")
    for python in options.encoders:
        for backend in ("onnx", "openvino"):
            yield f"sentence-transformers, {backend}", partial(InProcess, python, model, backend)
    for name, precision in OURS.items():
        yield name, partial(ours, bundle, precision)
    if options.infinity:
        for name, engine in (("torch", "torch"), ("ONNX", "optimum")):
            yield f"infinity, {name}", partial(infinity, options.infinity, model, engine)


def start(makers: Iterable[tuple[str, Callable[[], Peer]]], stack: ExitStack) -> dict[str, Peer]:
    """Start the contenders and pause each one with SIGSTOP. The first that starts under a name is kept."""
    peers: dict[str, Peer] = {}
    for name, make in makers:
        if name in peers:
            continue
        try:
            peers[name] = make()
        except OSError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        stack.callback(peers[name].end)
        with peers[name].resumed():
            pass
    return peers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parent", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, required=True, help="folder with senteval/downstream and retrieval")
    parser.add_argument("--infinity", metavar="PYTHON", help="interpreter of an environment with infinity")
    parser.add_argument(
        "--encoders",
        metavar="PYTHON",
        nargs="*",
        default=[],
        help="interpreters with sentence-transformers",
    )
    parser.add_argument("--quick", action="store_true", help="one round, two numbers of connections, half the texts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON and the chart are written")
    options = parser.parse_args()
    levels, rounds = (QUICK, 1) if options.quick else (CONNECTIONS, ROUNDS)
    work = workloads(options.data, 2 if options.quick else 1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model, bundle = options.parent, bundle_of(options.parent, Path(folder) / "minilm")
        if options.infinity:
            model = model_with_onnx(model, options.infinity, Path(folder) / "model")
        peers = start(makers(options, model, bundle), stack)
        raws = {f"{name}, tokenising and session alone": Raw(bundle, precision) for name, precision in OURS.items()}
        scores = accuracy(peers, options.data)
        figures = measure(peers, raws, work, levels, rounds)
        servers = {}
        for name, peer in peers.items():
            if isinstance(peer, Server):
                servers[name] = {"started": peer.started, "peak_mb": peer.peak_mb}
    results = {
        "machine": f"{processor()}, {available_cpus()} CPUs, shared with the clients",
        "versions": versions(PACKAGES),
        "rounds": rounds,
        "texts": {name: len(workload.texts) for name, workload in work.items()},
        "accuracy": scores,
        "servers": servers,
        "figures": figures,
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, options.out.with_suffix(".svg"))
    print(tables(results))


if __name__ == "__main__":
    main()
