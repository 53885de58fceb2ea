"""Half an hour at saturation against a real server process: every answer checked, memory and latency over time.

    python benchmarks/soak.py --bundles FOLDER --model NAME --data DATA

Clients send mixed requests in a closed loop, texts of one word and of more tokens than fit, to every model and route;
some leave before the answer. What the clients count must be what the server counts. Writes
benchmarks/results/soak.json and soak.svg, prints a line a minute, and ends with status 1 where a criterion fails.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import numpy as np
import orjson
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from throughput import processor

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("onnxruntime", "tokenizers", "numpy", "fastapi", "uvicorn", "httpx")

TEXTS = 40_000
KNOWN = 400  # texts of each model whose vectors are made before the load, alone, and compared under it
CHECKED = 0.2  # share of a request's texts that are known ones
SIZES = {"1 text": (1, 1), "2 to 16": (2, 16), "17 to 128": (17, 128), "129 to 2,000": (129, 2000)}
SIZE_WEIGHTS = (45, 35, 18, 2)
TOLERANCE = 1e-4
SETTINGS = ("--queue-seconds", "120")  # a saturated queue may be long where the machine is slow
LEAVERS = 0.02  # share of requests whose client leaves after up to so many seconds
LEAVING_SECONDS = 0.5
GROWTH = 0.05
BIN = 10  # seconds
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}

Vectors = NDArray[np.float32]


class Request(NamedTuple):
    """What is sent, and what its answer must be."""

    route: str  # as in the tables
    size: str
    path: str
    body: dict[str, Any]
    texts: int  # that the server embeds
    check: Callable[[Any], None]


@dataclass
class Books:
    """What the clients count. Seconds are since the load began."""

    counts: Counter[str] = field(default_factory=Counter)  # sent, answered, refused, left
    texts: Counter[str] = field(default_factory=Counter)  # the same of embedded texts
    checked: int = 0  # rows and cosines held against those computed before
    latencies: list[tuple[float, float, str, str]] = field(default_factory=list)  # end, seconds, route, size
    wrong: list[str] = field(default_factory=list)

    def note(self, outcome: str, request: Request) -> None:
        self.counts[outcome] += 1
        self.texts[outcome] += request.texts


class Sample(NamedTuple):
    """The server, once a second."""

    seconds: float
    rss_mb: float
    waiting: float  # texts
    texts: float
    tokens: float


def sentences(data: Path, rng: random.Random) -> list[str]:
    """Texts as they come: sentences, captions, words, nothing, emoji, and some of more tokens than fit."""
    plain = lines(data / "corpus" / "enwiki_sentences.txt") + lines(data / "corpus" / "multi30k_captions_nosts.txt")
    plain = rng.sample(plain, TEXTS)
    kinds: dict[Callable[[], str], float] = {
        lambda: rng.choice(plain): 86,
        lambda: rng.choice(rng.choice(plain).split()): 6,
        lambda: " ".join(rng.sample(plain, 4)): 3,
        lambda: " ".join(rng.sample(plain, 40)): 0.5,
        lambda: rng.choice(["", " ", "\n"]): 1.5,
        lambda: f"{rng.choice(plain)} {rng.choice(['👍🏽', '🎸🎶', '👩‍👩‍👧', '字 ✓', '🇨🇭'])}": 3,
    }
    makers = rng.choices(list(kinds), list(kinds.values()), k=TEXTS)
    return [make() for make in makers]


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


class Known:
    """Texts of one model, and their vectors and token ids as the idle service gave them, each text alone."""

    def __init__(self, model: str, texts: list[str], vectors: Vectors, ids: list[list[int]]) -> None:
        self.model = model
        self.texts = texts
        self.vectors = vectors
        self.ids = ids

    @classmethod
    async def make(cls, http: httpx.AsyncClient, model: str, texts: list[str]) -> "Known":
        vectors, ids = [], []
        for text in texts:
            found = await http.post(f"/models/{model}/embed", json={"inputs": text})
            vectors += found.raise_for_status().json()
            found = await http.post(f"/models/{model}/tokenize", json={"inputs": text})
            ids.append([token["id"] for token in found.raise_for_status().json()[0]])
        return cls(model, texts, np.array(vectors, dtype=np.float32), ids)


class Mix:
    """Draws one client's requests."""

    def __init__(self, known: dict[str, Known], default: str, texts: list[str], books: Books, seed: int) -> None:
        self.known = list(known.values())
        self.default = default
        self.texts = texts
        self.books = books
        self.rng = random.Random(seed)
        self.kinds: dict[Callable[[Known], Request], int] = {
            self.embed: 50,
            self.openai: 20,
            self.similarity: 12,
            self.search: 10,
            self.tokenize: 8,
        }

    def draw(self) -> Request:
        (make,) = self.rng.choices(list(self.kinds), list(self.kinds.values()))
        (known,) = self.rng.choices(self.known, [3 if each.model == self.default else 1 for each in self.known])
        return make(known)

    def embed(self, known: Known) -> Request:
        size, texts, places = self._texts(known)
        format = self.rng.choice(list(READ))

        def check(rows: Any) -> None:
            self._check_rows(READ[format], rows, len(texts), known, places)

        body = {"inputs": texts, "encoding_format": format}
        return Request(f"/embed {format}", size, *self._to(known, "/embed", body), len(texts), check)

    def openai(self, known: Known) -> Request:
        size, texts, places = self._texts(known)

        def check(found: Any) -> None:
            hold([row["index"] for row in found["data"]] == list(range(len(texts))), "the rows are out of order")
            hold(found["model"] == known.model, f"{found['model']} answered for {known.model}")
            rows = [row["embedding"] for row in found["data"]]
            self._check_rows(READ["base64"], rows, len(texts), known, places)

        body = {"input": texts, "encoding_format": "base64", "model": known.model}
        return Request("/v1/embeddings base64", size, "/v1/embeddings", body, len(texts), check)

    def similarity(self, known: Known) -> Request:
        """Known texts only, so that every cosine is checked."""
        size, places = self._places(known)
        one, *many = [*places, *self._places(known)[1]]

        def check(found: Any) -> None:
            self._check_cosines(found, known.vectors[many] @ known.vectors[one])

        inputs = {"source_sentence": known.texts[one], "sentences": [known.texts[place] for place in many]}
        path, body = self._to(known, "/similarity", {"inputs": inputs})
        return Request("/similarity", size, path, body, len(many) + 1, check)

    def search(self, known: Known) -> Request:
        """As similarity."""
        size, places = self._places(known)
        query = self.rng.randrange(len(known.texts))

        def check(found: Any) -> None:
            hold(sorted(hit["index"] for hit in found) == list(range(len(places))), "not every text has its place")
            scores = [hit["score"] for hit in found]
            hold(scores == sorted(scores, reverse=True), "the hits are out of order")
            expected = known.vectors[[places[hit["index"]] for hit in found]] @ known.vectors[query]
            self._check_cosines(scores, expected)

        asked = {"query": known.texts[query], "texts": [known.texts[place] for place in places]}
        return Request("/search", size, *self._to(known, "/search", asked), len(places) + 1, check)

    def tokenize(self, known: Known) -> Request:
        size, places = self._places(known)

        def check(found: Any) -> None:
            ids = [[token["id"] for token in tokens] for tokens in found]
            hold(ids == [known.ids[place] for place in places], "the tokens are not those of these texts")
            self.books.checked += len(places)

        body = {"inputs": [known.texts[place] for place in places]}
        return Request("/tokenize", size, *self._to(known, "/tokenize", body), 0, check)

    def _to(self, known: Known, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The model in the path, in the body, or nowhere where it is the default."""
        if known.model == self.default:
            return path, body
        return self.rng.choice([(f"/models/{known.model}{path}", body), (path, {**body, "model": known.model})])

    def _size(self) -> tuple[str, int]:
        """A class, and a number of texts in it, small ones more often."""
        (size,) = self.rng.choices(list(SIZES), SIZE_WEIGHTS)
        low, high = SIZES[size]
        return size, round(low * (high / low) ** self.rng.random())

    def _places(self, known: Known) -> tuple[str, list[int]]:
        """Known texts."""
        size, count = self._size()
        return size, self.rng.choices(range(len(known.texts)), k=count)

    def _texts(self, known: Known) -> tuple[str, list[str], dict[int, int]]:
        """Any texts, some of them known: their places in the request, and among the known."""
        size, count = self._size()
        texts = self.rng.choices(self.texts, k=count)
        places = {row: self.rng.randrange(len(known.texts)) for row in range(count) if self.rng.random() < CHECKED}
        for row, place in places.items():
            texts[row] = known.texts[place]
        return size, texts, places

    def _check_rows(self, read: "Reader", rows: Any, count: int, known: Known, places: dict[int, int]) -> None:
        hold(len(rows) == count, f"{len(rows)} rows for {count} texts")
        found = np.stack([read.decode(row) for row in rows])
        dimension = known.vectors.shape[1]
        hold(found.shape[1] == (-(-dimension // 8) if read.packed else dimension), f"rows of {found.shape[1]}")
        hold(bool(np.isfinite(found).all()), "a value is not finite")
        if places:
            hold(read.agree(found[list(places)], known.vectors[list(places.values())]), "a vector is another text's")
        self.books.checked += len(places)

    def _check_cosines(self, found: Any, expected: Vectors) -> None:
        hold(len(found) == len(expected), f"{len(found)} cosines for {len(expected)} texts")
        hold(bool(np.allclose(found, expected, rtol=0, atol=TOLERANCE)), "a cosine is another pair's")
        self.books.checked += len(expected)


class Reader(NamedTuple):
    """One encoding_format: a row as numbers, and whether rows are those of these vectors."""

    decode: Callable[[Any], NDArray[Any]]
    agree: Callable[[NDArray[Any], Vectors], bool]
    packed: bool = False


def near(tolerance: float) -> Callable[[NDArray[Any], Vectors], bool]:
    return lambda found, expected: bool(np.abs(found - expected).max() <= tolerance)


def near_int8(found: NDArray[Any], expected: Vectors) -> bool:
    """Each row is scaled by its own largest magnitude; a step of 1, half of it rounding, the rest tolerance."""
    return bool(np.abs(found - expected * 127 / np.abs(expected).max(axis=1, keepdims=True)).max() <= 1)


def same_signs(found: NDArray[Any], expected: Vectors) -> bool:
    """Of every value that is clear of 0."""
    positive = np.unpackbits(found.astype(np.uint8), axis=1, count=expected.shape[1]).astype(bool)
    return bool(((positive == (expected > 0)) | (np.abs(expected) <= TOLERANCE)).all())


READ = {
    "float": Reader(lambda row: np.array(row, dtype=np.float32), near(TOLERANCE)),
    "base64": Reader(lambda row: np.frombuffer(b64decode(row), "<f4"), near(TOLERANCE)),
    "float16": Reader(lambda row: np.frombuffer(b64decode(row), "<f2").astype(np.float32), near(TOLERANCE + 2**-11)),
    "int8": Reader(lambda row: np.array(row), near_int8),
    "binary": Reader(lambda row: np.array(row) + 128, same_signs, packed=True),
    "ubinary": Reader(lambda row: np.array(row), same_signs, packed=True),
}


def hold(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)


async def client(http: httpx.AsyncClient, mix: Mix, key: str, books: Books, started: float, until: float) -> None:
    """Send one request after another; a client that is refused waits as long as it is told."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    while time.monotonic() < until:
        request = mix.draw()
        books.note("sent", request)
        sent = time.monotonic()
        post = http.post(request.path, content=orjson.dumps(request.body), headers=headers)
        stays = mix.rng.random() >= LEAVERS
        try:
            response = await asyncio.wait_for(post, None if stays else mix.rng.random() * LEAVING_SECONDS)
        except TimeoutError:
            books.note("left", request)
            continue
        except httpx.TransportError as error:
            books.note("lost", request)
            books.wrong.append(f"{request.route}: {type(error).__name__}: {error}")
            continue
        if response.status_code == 429:
            books.note("refused", request)
            await asyncio.sleep(int(response.headers["retry-after"]))
            continue
        books.note("answered", request)
        ended = time.monotonic()
        books.latencies.append((ended - started, ended - sent, request.route, request.size))
        try:
            hold(response.status_code == 200, f"status {response.status_code}: {response.text[:200]}")
            request.check(orjson.loads(response.content))
        except Exception as error:
            books.wrong.append(f"{request.route}, {request.size}: {error!r:.300}")


class Server:
    """A real server process; its log is read, and what it warns of is kept."""

    def __init__(self, options: argparse.Namespace, keys: Sequence[str]) -> None:
        command = [sys.executable, "-m", "service", "--bundle", str(options.bundles), "--port", "0"]
        command += ["--model", options.model] if options.model else []
        command += SETTINGS
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
        environ["CLOZE_API_KEYS"] = ",".join(keys)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        assert self.process.stderr is not None
        self.url = next((found[1] for line in self.process.stderr if (found := SERVING.search(line))), "")
        if not self.url:
            raise SystemExit("the server did not start")
        self.warnings: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if LOUD.search(line):
                self.warnings.append(line.rstrip())

    @property
    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024

    def end(self) -> int:
        self.process.terminate()
        status = self.process.wait(60)
        self._reader.join(10)
        return status


SERVING = re.compile(r"serving (http://\S+)")
LOUD = re.compile(r" (WARNING|ERROR|CRITICAL) |Traceback")


@contextmanager
def served(options: argparse.Namespace, keys: Sequence[str]) -> Iterator[Server]:
    server = Server(options, keys)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()


Metrics = dict[str, list[tuple[dict[str, str], float]]]


async def scrape(http: httpx.AsyncClient) -> Metrics:
    text = (await http.get("/metrics")).raise_for_status().text
    found: Metrics = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return found


def total(metrics: Metrics, name: str, **labels: str) -> float:
    return sum(value for found, value in metrics[name] if labels.items() <= found.items())


async def watch(http: httpx.AsyncClient, server: Server, books: Books, started: float, samples: list[Sample]) -> None:
    """Sample the server each second, and say each minute how it is."""
    minute, seen = 1, 0
    while True:
        await asyncio.sleep(1)
        found = await scrape(http)
        seconds = time.monotonic() - started
        waiting = total(found, "cloze_queue_texts")
        texts, tokens = total(found, "cloze_texts_total"), total(found, "cloze_tokens_total")
        samples.append(Sample(seconds, server.rss_mb, waiting, texts, tokens))
        if seconds >= 60 * minute:
            recent = [latency for _, latency, _, _ in books.latencies[seen:]]
            seen, first = len(books.latencies), next(each for each in samples if each.seconds > seconds - 61)
            print(
                f"{minute:3} min: {len(recent)} answers, p50 {np.percentile(recent or [0], 50):.2f} s, "
                f"p99 {np.percentile(recent or [0], 99):.2f} s, {(tokens - first.tokens) / 60:.0f} tokens/s, "
                f"RSS {samples[-1].rss_mb:.0f} MB, {waiting:.0f} texts wait; in all {dict(books.counts)}, "
                f"{books.checked} checked, {len(books.wrong)} wrong",
                flush=True,
            )
            minute += 1


async def load(server: Server, options: argparse.Namespace, keys: Sequence[str], books: Books) -> dict[str, Any]:
    rng = random.Random(0)
    texts = sentences(options.data, rng)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
        http.headers["authorization"] = f"Bearer {keys[0]}"
        info = (await http.get("/info")).raise_for_status().json()
        known = {name: await Known.make(http, name, rng.sample(texts, KNOWN)) for name in info["models"]}
        before = await scrape(http)
        samples: list[Sample] = []
        started = time.monotonic()
        watching = asyncio.create_task(watch(http, server, books, started, samples))
        until = started + 60 * options.minutes
        mixes = [Mix(known, info["default_model"], texts, books, seed) for seed in range(options.clients)]
        clients = [client(http, mix, keys[n % len(keys)], books, started, until) for n, mix in enumerate(mixes)]
        await asyncio.gather(*clients)
        seconds = time.monotonic() - started
        watching.cancel()
        after = await settled(http)
    return {
        "info": info,
        "seconds": seconds,
        "samples": samples,
        "server": {name: difference(before, after, name) for name in ("cloze_texts_total", "cloze_tokens_total")},
        "statuses": statuses(before, after),
        "dropped": difference(before, after, "cloze_failures_total", reason="Dropped"),
    }


async def settled(http: httpx.AsyncClient) -> Metrics:
    """The metrics once nothing but their own request is at work: what left is forgotten by then."""
    for _ in range(600):
        found = await scrape(http)
        if total(found, "cloze_requests_in_flight") == 1:
            return found
        await asyncio.sleep(0.1)
    raise SystemExit("requests are at work that nobody waits for")


def difference(before: Metrics, after: Metrics, name: str, **labels: str) -> int:
    return int(total(after, name, **labels) - total(before, name, **labels))


def statuses(before: Metrics, after: Metrics) -> dict[str, int]:
    """Answers by status; the scrapes are not of the load."""
    found = {labels["status"] for labels, _ in after["cloze_requests_total"]}
    own = difference(before, after, "cloze_requests_total", route="/metrics", status="200")
    counts = {status: difference(before, after, "cloze_requests_total", status=status) for status in sorted(found)}
    counts["200"] -= own
    return {status: count for status, count in counts.items() if count}


def rss_growth(samples: Sequence[Sample], seconds: float) -> tuple[float, float]:
    """MB after the first minute and at the end, each the median of a window."""
    settle, window = min(60.0, seconds / 4), min(60.0, seconds / 8)
    first = [each.rss_mb for each in samples if settle <= each.seconds < settle + window]
    last = [each.rss_mb for each in samples if each.seconds >= seconds - window]
    return median(first), median(last)


def criteria(found: dict[str, Any], books: Books, status: int, warnings: Sequence[str]) -> dict[str, bool]:
    sent, answered, refused, left = (books.counts[name] for name in ("sent", "answered", "refused", "left"))
    server = found["statuses"]
    known = sum(server.values()) + found["dropped"] - server.get("499", 0)  # requests the server has seen
    first, last = rss_growth(found["samples"], found["seconds"])
    texts = found["server"]["cloze_texts_total"]
    return {
        "every answer is right": not books.wrong,
        "no request is lost: sent = answered + refused + left": sent == answered + refused + left,
        "the server has answered 200, 429 or a client that had gone": set(server) <= {"200", "429", "499"},
        "the server's answers are the clients'": answered <= server.get("200", 0) <= answered + left,
        "the server's refusals are the clients'": refused <= server.get("429", 0) <= refused + left,
        "the server has seen what was sent": sent - left <= known <= sent,
        "the server's texts are the clients'": books.texts["answered"] <= texts <= sent_texts(books),
        f"RSS grows by less than {GROWTH:.0%}": last / first - 1 < GROWTH,
        "texts wait in 95 of 100 seconds or more": waiting_share(found["samples"]) >= 0.95,
        "the server ends with status 0, and its log warns of nothing": status == 0 and not warnings,
    }


def sent_texts(books: Books) -> int:
    return books.texts["answered"] + books.texts["left"]


def waiting_share(samples: Sequence[Sample]) -> float:
    return sum(each.waiting > 0 for each in samples) / len(samples)


def by_class(books: Books, key: Callable[[tuple[float, float, str, str]], str]) -> dict[str, dict[str, float]]:
    """Requests and the percentiles of their latencies, in milliseconds."""
    classes: dict[str, list[float]] = defaultdict(list)
    for each in books.latencies:
        classes[key(each)].append(1000 * each[1])
    return {
        name: {"requests": len(values), **percentiles(values)} for name, values in sorted(classes.items(), key=_order)
    }


def _order(named: tuple[str, list[float]]) -> tuple[int, str]:
    """Sizes as they rise, then the rest by name."""
    sizes = [f"vectors, {size}" for size in SIZES]
    return (sizes.index(named[0]) if named[0] in sizes else len(sizes)), named[0]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {name: round(float(np.percentile(values, rank)), 1) for name, rank in PERCENTILES.items()}


def size_of(each: tuple[float, float, str, str]) -> str:
    return "/tokenize" if each[2] == "/tokenize" else f"vectors, {each[3]}"


def over_time(books: Books, samples: Sequence[Sample], seconds: float) -> dict[str, list[float]]:
    """Every BIN seconds: memory, tokens a second, and latencies in milliseconds of the requests with one text."""
    bins = int(seconds // BIN)
    latencies: list[list[float]] = [[] for _ in range(bins)]
    for ended, latency, _, size in books.latencies:
        if size == "1 text" and ended < bins * BIN:
            latencies[int(ended // BIN)].append(1000 * latency)
    grouped = [[each for each in samples if place <= each.seconds / BIN < place + 1] for place in range(bins)]
    series: dict[str, list[float]] = {
        "rss_mb": [round(median(each.rss_mb for each in group), 1) for group in grouped if group],
        "tokens_per_second": [
            round((later[-1].tokens - group[-1].tokens) / (later[-1].seconds - group[-1].seconds))
            for group, later in pairwise(grouped)
            if group and later
        ],
    }
    for name, rank in PERCENTILES.items():
        if name in ("p50", "p90", "p99", "max"):
            series[name] = [round(float(np.percentile(group, rank)), 1) for group in latencies if group]
    return series


def draw(results: dict[str, Any], path: Path) -> None:
    """Three panels over the minutes, as SVG; the same bytes for the same results."""
    plt.rcParams |= {"svg.hashsalt": "soak", "svg.fonttype": "none"}
    series = results["over_time"]
    panels: dict[str, Sequence[str]] = {
        "memory of the server, RSS in MB": ["rss_mb"],
        "tokens a second": ["tokens_per_second"],
        "requests with one text, milliseconds": ["max", "p99", "p90", "p50"],
    }
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 7), sharex=True, layout="constrained")
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            axis.plot(np.linspace(0, results["minutes"], len(series[name])), series[name], label=name)
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[-1].set(yscale="log", xlabel="minutes")
    axes[-1].legend(ncols=4)
    figure.savefig(path, metadata={"Date": None})


def table(results: dict[str, Any]) -> str:
    rows = [f"| milliseconds | requests | {' | '.join(PERCENTILES)} |", "| --- |" + " ---: |" * (len(PERCENTILES) + 1)]
    for name, figures in {**results["by_size"], **results["by_route"]}.items():
        cells = [f"{figures['requests']}", *(f"{figures[rank]:.0f}" for rank in PERCENTILES)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def report(found: dict[str, Any], books: Books, options: argparse.Namespace, held: dict[str, bool]) -> dict[str, Any]:
    first, last = rss_growth(found["samples"], found["seconds"])
    seconds, server = found["seconds"], found["server"]
    return {
        "minutes": round(seconds / 60, 2),
        "clients": options.clients,
        "models": found["info"]["models"],
        "settings": " ".join(SETTINGS),
        "default_model": found["info"]["default_model"],
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} CPUs, shared by the server and its clients",
        "versions": {package: version(package) for package in PACKAGES},
        "criteria": held,
        "requests": {name: books.counts[name] for name in ("sent", "answered", "refused", "left", "lost")},
        "texts": {name: books.texts[name] for name in ("sent", "answered", "refused", "left", "lost")},
        "checked": books.checked,
        "wrong": books.wrong[:20],
        "server": {"statuses": found["statuses"], "dropped": found["dropped"], **server},
        "texts_per_second": round(server["cloze_texts_total"] / seconds, 1),
        "tokens_per_second": round(server["cloze_tokens_total"] / seconds),
        "share_of_seconds_in_which_texts_wait": round(waiting_share(found["samples"]), 4),
        "rss_mb": {"after the first minute": round(first, 1), "at the end": round(last, 1)},
        "rss_growth": round(last / first - 1, 4),
        "by_size": by_class(books, size_of),
        "by_route": by_class(books, lambda each: each[2]),
        "seconds_a_step": BIN,
        "over_time": over_time(books, found["samples"], seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, required=True, help="folder of one bundle, or of several")
    parser.add_argument("--model", default="", help="the default where there are several; gets most requests")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder that holds corpus/")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=24, help="connections, four to an API key")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    keys = [f"soak-client-number-{number}" for number in range(-(-options.clients // 4))]
    books = Books()
    with served(options, keys) as server:
        found = asyncio.run(load(server, options, keys, books))
        held = criteria(found, books, server.end(), server.warnings)
    results = report(found, books, options, held)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(results, options.out / "soak.svg")
    print(table(results))
    print(*(f"{'held' if true else 'FAILED'}: {criterion}" for criterion, true in held.items()), sep="\n")
    print(*books.wrong[:20], *server.warnings[:20], sep="\n")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
