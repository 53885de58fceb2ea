"""Load a real server process for half an hour, check every answer, and record memory and latency.

    python -m benchmarks.soak --bundles FOLDER --model NAME --data DATA

Each client sends one mixed request after another, to every model and route, with texts from one word to more tokens
than fit. Some clients disconnect before the answer. With --deaf, so many more do not read the large answers that they
ask for, and nobody reads the log in 20 seconds of each minute. With --reload-seconds, the default model is replaced
again and again by a copy of it, which has the same vectors. The counts of the clients must match those of the server.
The command writes benchmarks/results/soak.json and soak.svg, prints one line per minute, and exits with status 1 if a
criterion fails.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak_report import Run, Sample, criteria, draw, figures, table
from benchmarks.soak_requests import DEAF_TEXTS, Books, Known, Mix, client, deaf, sentences
from cloze.encoding.bundle import SPEC_FILE
from cloze.machine import available_cpus, processor, versions

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("onnxruntime", "tokenizers", "numpy", "fastapi", "uvicorn", "httpx")

KNOWN = 400  # texts of each model that are embedded one by one before the load and compared with the answers under load
ADMIN = "soak-administrator"
PAUSE = 20  # seconds in which the log is not read
SETTINGS = ("--queue-seconds", "120")  # a saturated queue is long on a slow machine


class Server:
    """A real server process. Its log is read, and its warnings are kept."""

    def __init__(self, bundles: Path, options: argparse.Namespace, keys: Sequence[str]) -> None:
        command = [sys.executable, "-m", "cloze.service", "--bundle", str(bundles), "--port", "0"]
        command += ["--model", options.model] if options.model else []
        command += SETTINGS
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
        environ |= {"CLOZE_API_KEYS": ",".join(keys), "CLOZE_ADMIN_KEYS": ADMIN}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        assert self.process.stderr is not None
        self.url = next((match[1] for line in self.process.stderr if (match := SERVING.search(line))), "")
        if not self.url:
            raise SystemExit("the server did not start")
        self.warnings: list[str] = []
        self.pauses = bool(options.deaf)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if self.pauses and time.monotonic() % 60 < PAUSE:
                time.sleep(PAUSE)
            if LOUD.search(line):
                self.warnings.append(line.rstrip())

    @property
    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024

    def end(self) -> int:
        self.process.terminate()
        status = self.process.wait(60)
        self._reader.join(10 + PAUSE)
        return status


SERVING = re.compile(r"serving (http://[^\s;]+)")
LOUD = re.compile(r" (WARNING|ERROR|CRITICAL) |Traceback")


@contextmanager
def served(bundles: Path, options: argparse.Namespace, keys: Sequence[str]) -> Iterator[Server]:
    server = Server(bundles, options, keys)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()


class Twins:
    """A folder of links to the bundles. That of the default model leads to it or to a copy with another model card."""

    def __init__(self, bundles: Path, model: str, folder: Path) -> None:
        single = (bundles / SPEC_FILE).exists()
        original = (bundles if single else bundles / model).resolve()
        self.served, copy = folder / "served", folder / "copy"
        self.served.mkdir()
        for bundle in [original] if single else bundles.iterdir():
            (self.served / bundle.name).symlink_to(bundle.resolve())
        shutil.copytree(original, copy)
        with (copy / "README.md").open("a", encoding="utf-8") as card:
            card.write("\n")
        spec = json.loads((copy / SPEC_FILE).read_text(encoding="utf-8"))
        spec["files"]["README.md"] = sha256((copy / "README.md").read_bytes()).hexdigest()
        (copy / SPEC_FILE).write_text(json.dumps(spec), encoding="utf-8")
        self._link, self._targets = self.served / original.name, cycle([copy, original])

    def swap(self) -> None:
        new = self.served / ".next"
        new.symlink_to(next(self._targets))
        os.replace(new, self._link)


async def reload(http: httpx.AsyncClient, twins: Twins, seconds: float) -> None:
    """Replace the default model every so many seconds; SystemExit where the service does not."""
    headers = {"authorization": f"Bearer {ADMIN}"}
    while True:
        await asyncio.sleep(seconds)
        twins.swap()
        response = await http.post("/admin/reload", headers=headers)
        if response.status_code != 200 or not response.json()["changed"]:
            raise SystemExit(f"a reload was answered {response.status_code}: {response.text}")


Metrics = dict[str, list[tuple[dict[str, str], float]]]


async def scrape(http: httpx.AsyncClient) -> Metrics:
    text = (await http.get("/metrics")).raise_for_status().text
    metrics: Metrics = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            metrics[sample.name].append((sample.labels, sample.value))
    return metrics


def total(metrics: Metrics, name: str, **labels: str) -> float:
    return sum(value for sample_labels, value in metrics[name] if labels.items() <= sample_labels.items())


async def watch(http: httpx.AsyncClient, server: Server, books: Books, started: float, samples: list[Sample]) -> None:
    """Sample the server each second, and print a summary each minute."""
    minute, summarised = 1, 0
    while True:
        await asyncio.sleep(1)
        metrics = await scrape(http)
        seconds = time.monotonic() - started
        waiting = total(metrics, "cloze_queue_texts")
        texts, tokens = total(metrics, "cloze_texts_total"), total(metrics, "cloze_tokens_total")
        samples.append(Sample(seconds, server.rss_mb, waiting, texts, tokens))
        if seconds >= 60 * minute:
            recent = [latency for _, latency, _, _ in books.latencies[summarised:]]
            summarised = len(books.latencies)
            first = next(sample for sample in samples if sample.seconds > seconds - 61)
            print(
                f"{minute:3} min: {len(recent)} answers, p50 {np.percentile(recent or [0], 50):.2f} s, "
                f"p99 {np.percentile(recent or [0], 99):.2f} s, {(tokens - first.tokens) / 60:.0f} tokens/s, "
                f"RSS {samples[-1].rss_mb:.0f} MiB, {waiting:.0f} texts wait; in total {dict(books.counts)}, "
                f"{books.checked} checked, {len(books.wrong)} wrong",
                flush=True,
            )
            minute += 1


async def load(
    server: Server, twins: Twins, options: argparse.Namespace, keys: Sequence[str]
) -> tuple[dict[str, Any], Run]:
    """The response of `/info`, and the final counts of the clients and the server."""
    rng, books, samples = random.Random(0), Books(), list[Sample]()
    texts = sentences(options.data, rng)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
        http.headers["authorization"] = f"Bearer {keys[0]}"
        info = (await http.get("/info")).raise_for_status().json()
        known = {name: await Known.make(http, name, rng.sample(texts, KNOWN)) for name in info["models"]}
        before = await scrape(http)
        started = time.monotonic()
        beside = [asyncio.create_task(watch(http, server, books, started, samples))]
        if options.reload_seconds:
            beside.append(asyncio.create_task(reload(http, twins, options.reload_seconds)))
        until = started + 60 * options.minutes
        mixes = [Mix(known, info["default_model"], texts, books, seed) for seed in range(options.clients)]
        hostile = [deaf(server.url, keys[0], rng.sample(texts, DEAF_TEXTS), books, until) for _ in range(options.deaf)]
        clients = [client(http, mix, keys[n % len(keys)], books, started, until) for n, mix in enumerate(mixes)]
        await asyncio.gather(*clients, *hostile)
        seconds = time.monotonic() - started
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        after = await settled(http)
    info["reloads"] = difference(before, after, "cloze_reloads_total", outcome="swapped")
    return info, Run(
        books=books,
        samples=samples,
        seconds=seconds,
        statuses=statuses(before, after),
        dropped=difference(before, after, "cloze_failures_total", reason="Dropped"),
        texts=difference(before, after, "cloze_texts_total"),
        tokens=difference(before, after, "cloze_tokens_total"),
    )


async def settled(http: httpx.AsyncClient) -> Metrics:
    """The metrics once no other request is in flight, not even one whose client has disconnected."""
    for _ in range(600):
        metrics = await scrape(http)
        if total(metrics, "cloze_requests_in_flight") == 1:
            return metrics
        await asyncio.sleep(0.1)
    raise SystemExit("requests are still in flight although every client has finished")


def difference(before: Metrics, after: Metrics, name: str, **labels: str) -> int:
    return int(total(after, name, **labels) - total(before, name, **labels))


def statuses(before: Metrics, after: Metrics) -> dict[str, int]:
    """Responses by status, without those to the scrapes of the metrics and to the reloads."""
    codes = {labels["status"] for labels, _ in after["cloze_requests_total"]}
    own = difference(before, after, "cloze_requests_total", route="/metrics", status="200")
    counts = {status: difference(before, after, "cloze_requests_total", status=status) for status in sorted(codes)}
    reloads = difference(before, after, "cloze_requests_total", route="/admin/reload", status="200")
    counts["200"] -= own + reloads
    return {status: count for status, count in counts.items() if count}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, required=True, help="folder of one bundle or of several")
    parser.add_argument("--model", default="", help="the default of several models; it receives most requests")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that contains corpus/")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=24, help="number of connections; four share one API key")
    parser.add_argument("--deaf", type=int, default=0, help="number of clients that do not read their answers")
    parser.add_argument("--reload-seconds", type=float, default=0, help="replace the default model so often; 0: never")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    keys = [f"soak-client-number-{number}" for number in range(-(-options.clients // 4))]
    with TemporaryDirectory() as folder:
        twins = Twins(options.bundles, options.model, Path(folder))
        with served(twins.served, options, keys) as server:
            info, run = asyncio.run(load(server, twins, options, keys))
            verdicts = criteria(run, server.end(), server.warnings, deaf=bool(options.deaf))
    results = {
        "clients": options.clients,
        "deaf": options.deaf,
        "models": info["models"],
        "default_model": info["default_model"],
        "reloads": info["reloads"],
        "settings": " ".join(SETTINGS),
        "code": f"Cloze {version('cloze')}",
        "machine": f"{processor()}, {available_cpus()} CPUs, shared by the server and its clients",
        "versions": versions(PACKAGES),
        "criteria": verdicts,
        **figures(run),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(results, options.out / "soak.svg")
    print(table(results))
    print(*(f"{'held' if holds else 'FAILED'}: {criterion}" for criterion, holds in verdicts.items()), sep="\n")
    print(*run.books.wrong[:20], *server.warnings[:20], sep="\n")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
