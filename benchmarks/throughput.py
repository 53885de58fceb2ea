"""Sentences a second, side by side in one run: sentence-transformers in torch, a bundle's graphs, a bundle over HTTP.

    python benchmarks/throughput.py --bundle models/cloze-mini --parent runs/parents/all-MiniLM-L6-v2 --data DATA

Every contender embeds the same sentences once a round, in turn; the ratio is taken round by round against the first.
Writes benchmarks/results/throughput.json and prints its table.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

RESULTS = Path(__file__).parent / "results" / "throughput.json"
PACKAGES = ("onnxruntime", "torch", "transformers", "sentence-transformers", "tokenizers", "numpy")

VECTOR_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni")

Contender = Callable[[Sequence[str]], object]


def sentence_transformers(parent: str) -> Contender:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(parent, device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=32, show_progress_bar=False)


def graph(bundle: str, precision: str) -> Contender:
    """The service's own session and text encoder, without HTTP; batches by length, as large as the service's."""
    from encoding.bundle import Bundle
    from service.session import Session

    loaded = Bundle.load(bundle)
    session = Session.load(loaded, precision=precision, provider="cpu")

    def embed(texts: Sequence[str]) -> None:
        sequences = sorted((tokens.ids for tokens in loaded.text_encoder.encode(texts)), key=len)
        rows: list[list[int]] = []
        for ids in sequences:
            if rows and len(ids) * (len(rows) + 1) > session.batch_tokens:
                session.run(loaded.text_encoder.pad(rows))
                rows = []
            rows.append(ids)
        session.run(loaded.text_encoder.pad(rows))

    return embed


@contextmanager
def served(bundle: str, texts_a_request: int, clients: int) -> Iterator[Contender]:
    """A real server process, and clients that keep so many requests in the air."""
    command = [sys.executable, "-m", "service", "--bundle", bundle, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = next(line.rpartition("serving ")[2].strip() for line in process.stderr if "serving http" in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()  # each request is a line; a full pipe blocks

        async def send(texts: Sequence[str]) -> None:
            requests = iter(range(0, len(texts), texts_a_request))
            async with httpx.AsyncClient(base_url=address, timeout=120) as client:

                async def worker() -> None:
                    for start in requests:
                        body = {"inputs": texts[start : start + texts_a_request]}
                        (await client.post("/embed", json=body)).raise_for_status()

                await asyncio.gather(*(worker() for _ in range(clients)))

        try:
            yield lambda texts: asyncio.run(send(texts))
        finally:
            process.terminate()


def measure(contenders: dict[str, Contender], texts: Sequence[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Sentences a second of each round, and the ratio to the first contender of the same round."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender(texts[:256])  # warm
    for _ in range(rounds):
        for name, contender in contenders.items():
            started = time.perf_counter()
            contender(texts)
            speeds[name].append(len(texts) / (time.perf_counter() - started))
    first = next(iter(speeds.values()))
    return {
        name: {"speed": values, "ratio": [value / base for value, base in zip(values, first, strict=True)]}
        for name, values in speeds.items()
    }


def table(results: dict[str, Any]) -> str:
    lines = ["| | sentences a second | ratio, median (min to max) |", "| --- | ---: | ---: |"]
    for name, figures in results["contenders"].items():
        ratios = figures["ratio"]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {name} | {median(figures['speed']):.0f} | {spread} |")
    return "\n".join(lines)


def processor() -> str:
    """The CPU's name, and which of the vector extensions it has that int8 arithmetic uses."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    vectors = [flag for flag in VECTOR_FLAGS if flag in found.get("flags", "").split()]
    return f"{found.get('model name') or platform.processor()} ({', '.join(vectors) or 'no AVX2'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True, help="bundle to measure, each of its precisions")
    parser.add_argument("--parent", required=True, help="model for sentence-transformers")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds senteval/downstream")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from encoding.bundle import Bundle
    from training.sts import load_pairs

    pairs = load_pairs(options.data / "senteval/downstream/STS/STSBenchmark/sts-dev.csv")
    texts = sorted({*pairs.left, *pairs.right})
    np.random.default_rng(0).shuffle(texts)
    name = Path(options.bundle).name
    contenders = {"sentence-transformers, the parent, torch fp32": sentence_transformers(options.parent)}
    for precision in Bundle.load(options.bundle).precisions:
        contenders[f"{name} {precision}, ONNX Runtime"] = graph(options.bundle, precision)
    with (
        served(options.bundle, texts_a_request=32, clients=8) as many,
        served(options.bundle, texts_a_request=1, clients=32) as single,
    ):
        contenders[f"{name} over HTTP, 32 texts a request, 8 clients"] = many
        contenders[f"{name} over HTTP, 1 text a request, 32 clients"] = single
        figures = measure(contenders, texts, options.rounds)
    results = {
        "texts": f"{len(texts)} sentences of STS-B dev",
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} CPUs",
        "versions": {package: version(package) for package in PACKAGES},
        "contenders": figures,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
