"""Compare the speed of Cloze with servers and libraries that embed, on the same weights and texts.

    python -m benchmarks.serving --parent MODEL --data DATA [--infinity PYTHON] [--encoders PYTHON …]
        [--gguf FILE] [--quick]

MODEL is a folder of all-MiniLM-L6-v2. Cloze serves it as a bundle made by this command, in fp32 and int8, without a
template. `--infinity` is the Python interpreter of an environment with infinity-emb[server,torch,optimum]; both of its
engines are then measured. `--encoders` are the interpreters of environments with sentence-transformers and its onnx or
openvino backend, which are measured in fp32 and in int8, with fastembed or with llama-cpp-python, which reads FILE:
the same weights as GGUF in q8_0. Without these options, Cloze is compared with sentence-transformers in torch only.
wrk must be installed: it drives the load.

First, the vectors of every contender are compared with those of torch, and those of texts alone with those of the same
texts in a batch. Then, in rounds, are measured: short texts, one per request, over 1, 8, 32 and 128 connections; mixed
texts, 32 per request, over 1, 8 and 32; long texts, eight per request, over 8. Libraries run in process, without
connections, and are compared with the highest throughput. Ratios are computed for each round. The command writes
benchmarks/results/serving.json and serving.svg and prints the tables.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.load import Figures, Workload, ask, load
from benchmarks.peers import InProcess, Peer, Raw, Server, bundle_of, infinity, ours, truncate, with_graphs
from benchmarks.serving_report import draw, tables
from cloze.encoding.bundle import Precision
from cloze.machine import available_cpus, processor, versions
from cloze.training.evaluation.search import find_collections, load_collection
from cloze.training.evaluation.sts import load_pairs, spearman

RESULTS: Final = Path(__file__).parent / "results" / "serving.json"
PACKAGES: Final = ("onnxruntime", "tokenizers", "numpy", "fastapi", "uvicorn", "torch", "sentence-transformers")
QUICK: Final = (1, 32)
ROUNDS: Final = 3
CHECKED: Final = 100  # texts whose vectors are compared
ONE_BY_ONE: Final = 200  # texts that the bare session embeds one by one, for its latency
CALIBRATION: Final = 512  # sentences
ALONE: Final = 32  # texts that are also embedded alone
OURS: Final[dict[str, Precision]] = {"Cloze, int8": "int8", "Cloze, fp32": "fp32"}
LIBRARIES: Final = {
    "sentence-transformers, onnx": "onnx",
    "sentence-transformers, onnx int8": "onnx-int8",
    "sentence-transformers, openvino": "openvino",
    "sentence-transformers, openvino int8": "openvino-int8",
    "fastembed": "fastembed",
    "llama.cpp, q8_0": "llama-cpp",
}  # contender -> BACKEND of benchmarks/encode.py


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
        "short, 1 per request": Workload(short[: 2000 // share], 1, QUICK if share > 1 else (1, 8, 32, 128)),
        "mixed, 32 per request": Workload(mixed[: 1600 // share], 32, (1, 8, 32)),
        "long, 8 per request": Workload(documents[160 : 160 + 160 // share], 8),
    }


def calibration(data: Path, out: Path) -> None:
    """Write a folder with sentences of Wikipedia, by which OpenVINO chooses the ranges of its int8 values."""
    out.mkdir()
    with (data / "corpus" / "enwiki_sentences.txt").open(encoding="utf-8") as lines:
        rows = [json.dumps({"text": line.strip()}) + "\n" for line in islice(lines, CALIBRATION)]
    (out / "train.jsonl").write_text("".join(rows), encoding="utf-8")


def vectors(peer: Peer, texts: Sequence[str]) -> NDArray[Any]:
    """The texts' vectors, normalised to length 1."""
    if isinstance(peer, InProcess):
        rows = peer.encode(texts)[1]
    else:
        assert isinstance(peer, Server)
        parts = [texts[first : first + 32] for first in range(0, len(texts), 32)]
        bodies, _ = asyncio.run(ask(peer, [peer.request(part) for part in parts], 4))
        rows = np.array([row["embedding"] for body in bodies for row in json.loads(body)["data"]], dtype=np.float32)
    normalised: NDArray[Any] = rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return normalised


def accuracy(peers: Mapping[str, Peer], data: Path, long: Sequence[str]) -> dict[str, dict[str, float]]:
    """Cosines with torch's vectors, the change of a component by the batch, and Spearman's x 100 on STS-B dev."""
    pairs = load_pairs(data / "senteval/downstream/STS/STSBenchmark/sts-dev.csv")
    expected: NDArray[np.float64] | None = None
    figures = {}
    for name, peer in peers.items():
        with peer.resumed():
            checked = vectors(peer, [*pairs.left[:CHECKED], *long])
            alone = np.concatenate([vectors(peer, [text]) for text in pairs.left[:ALONE]])
            score = spearman(partial(vectors, peer), pairs)
        expected = checked if expected is None else expected
        cosines = (checked * expected).sum(axis=1)
        figures[name] = {
            "least": float(cosines.min()),
            "mean": float(cosines.mean()),
            "batch": float(np.abs(alone - checked[:ALONE]).max()),
            "STS-B dev": float(score),
        }
        print(f"{name}: {figures[name]}", flush=True)
    return figures


def measure(
    peers: Mapping[str, Peer], raws: Mapping[str, Raw], work: Mapping[str, Workload], rounds: int
) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """Figures by workload, number of connections (or "in process"), contender and round."""
    results: dict[str, dict[str, dict[str, list[Any]]]] = {name: {} for name in work}

    def note(name: str, level: str, contender: str, figures: Figures) -> None:
        results[name].setdefault(level, {}).setdefault(contender, []).append(asdict(figures))

    for number in range(rounds):
        for name, workload in work.items():
            print(f"round {number + 1}: {name}", flush=True)
            for contender, peer in peers.items():
                with peer.resumed():
                    vectors(peer, workload.texts[:CHECKED])  # what was paused may have lost its memory to the disk
                    if isinstance(peer, Server):
                        for level in workload.connections:
                            note(name, str(level), contender, load(peer, workload, level))
                    elif isinstance(peer, InProcess):
                        cpu = peer.cpu_seconds
                        seconds, _ = peer.encode(workload.texts)
                        rate = len(workload.texts) / seconds
                        note(name, "in process", contender, Figures(rate, seconds, seconds, peer.cpu_seconds - cpu))
            for contender, raw in raws.items():
                seconds, cpu = raw.encode(workload.texts)
                p50, p99 = np.percentile(raw.one_by_one(workload.texts[:ONE_BY_ONE]), [50, 99])
                note(name, "in process", contender, Figures(len(workload.texts) / seconds, p50, p99, cpu))
    return results


def makers(
    options: argparse.Namespace, model: Path, bundle: Path, texts: Path
) -> Iterator[tuple[str, Callable[[], Peer]]]:
    """How each contender is started, torch first. `model` has all graphs, `texts` those that calibrate."""
    yield "sentence-transformers, torch", partial(InProcess, sys.executable, "torch", options.parent, texts)
    for python in options.encoders:
        for name, backend in LIBRARIES.items():
            yield name, partial(InProcess, python, backend, model, texts)
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
    parser.add_argument("--data", type=Path, required=True, help="folder with senteval, retrieval and corpus")
    parser.add_argument("--infinity", metavar="PYTHON", help="interpreter of an environment with infinity")
    parser.add_argument(
        "--encoders",
        metavar="PYTHON",
        nargs="*",
        default=[],
        help="interpreters with sentence-transformers, fastembed or llama-cpp-python",
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the weights for llama.cpp")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often everything is measured in turn")
    parser.add_argument("--quick", action="store_true", help="one round, fewer numbers of connections and texts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON and the chart are written")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        parser.error("wrk is not installed; Debian's package wrk has it")
    rounds = 1 if options.quick else options.rounds
    work = workloads(options.data, 2 if options.quick else 1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bundle = bundle_of(options.parent, Path(folder) / "minilm")
        pythons = [*([options.infinity] if options.infinity else []), *options.encoders]
        model = with_graphs(options.parent, pythons, options.gguf, Path(folder) / "model")
        truncate(model)
        texts = Path(folder) / "texts"
        if options.encoders:
            calibration(options.data, texts)
        peers = start(makers(options, model, bundle, texts), stack)
        raws = {f"{name}, tokenising and session alone": Raw(bundle, precision) for name, precision in OURS.items()}
        scores = accuracy(peers, options.data, work["long, 8 per request"].texts[:CHECKED])
        figures = measure(peers, raws, work, rounds)
        servers = {}
        for name, peer in peers.items():
            if isinstance(peer, Server):
                servers[name] = {"started": peer.started, "peak_mb": peer.peak_mb}
    results = {
        "machine": f"{processor()}, {available_cpus()} CPUs, shared with the clients",
        "date": datetime.now(UTC).date().isoformat(),
        "cloze": version("cloze"),
        "versions": versions(PACKAGES),
        "rounds": rounds,
        "texts": {name: len(workload.texts) for name, workload in work.items()},
        "accuracy": scores,
        "rivals": {name: peer.versions for name, peer in peers.items() if isinstance(peer, InProcess)},
        "servers": servers,
        "figures": figures,
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, options.out.with_suffix(".svg"))
    print(tables(results))


if __name__ == "__main__":
    main()
