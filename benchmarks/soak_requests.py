"""The clients of the soak test: what they send, how they check each answer, and what they count."""

import asyncio
import random
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

TEXTS = 40_000
CHECKED = 0.2  # share of a request's texts whose vectors are known
SIZES = {"1 text": (1, 1), "2 to 16": (2, 16), "17 to 128": (17, 128), "129 to 2,000": (129, 2000)}
SIZE_WEIGHTS = (45, 35, 18, 2)
TOLERANCE = 1e-4
LEAVERS = 0.02  # share of requests whose client disconnects within LEAVING_SECONDS
LEAVING_SECONDS = 0.5
DEAF_TEXTS = 4096  # of a request whose answer is not read: 19 MB
DEAF_SECONDS = 20

Vectors = NDArray[np.float32]


class Request(NamedTuple):
    """A request, and the check of its answer."""

    route: str  # the name in the tables
    size: str
    path: str
    body: dict[str, Any]
    texts: int  # texts that the server embeds
    check: Callable[..., None]


@dataclass
class Books:
    """Counts of the clients. Times are seconds since the load began."""

    counts: Counter[str] = field(default_factory=Counter)  # sent, answered, refused, left
    texts: Counter[str] = field(default_factory=Counter)  # the same counts for embedded texts
    checked: int = 0  # rows and cosines compared with those computed before the load
    latencies: list[tuple[float, float, str, str]] = field(default_factory=list)  # end, seconds, route, size
    wrong: list[str] = field(default_factory=list)

    def note(self, outcome: str, request: Request) -> None:
        self.counts[outcome] += 1
        self.texts[outcome] += request.texts


def sentences(data: Path, rng: random.Random) -> list[str]:
    """Varied texts: sentences, captions, words, empty texts, emoji, and texts with more tokens than fit."""
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
    """Texts for one model with the vectors and token ids that the idle service returned for each text alone."""

    def __init__(self, model: str, texts: list[str], vectors: Vectors, ids: list[list[int]]) -> None:
        self.model = model
        self.texts = texts
        self.vectors = vectors
        self.ids = ids

    @classmethod
    async def make(cls, http: httpx.AsyncClient, model: str, texts: list[str]) -> "Known":
        vectors, ids = [], []
        for text in texts:
            response = await http.post(f"/models/{model}/embed", json={"inputs": text})
            vectors += response.raise_for_status().json()
            response = await http.post(f"/models/{model}/tokenize", json={"inputs": text})
            ids.append([token["id"] for token in response.raise_for_status().json()[0]])
        return cls(model, texts, np.array(vectors, dtype=np.float32), ids)


class Mix:
    """Draws the requests of one client."""

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
        (known,) = self.rng.choices(
            self.known, [3 if candidate.model == self.default else 1 for candidate in self.known]
        )
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

        def check(answer: Any) -> None:
            hold([row["index"] for row in answer["data"]] == list(range(len(texts))), "the rows are out of order")
            hold(answer["model"] == known.model, f"{answer['model']} answered for {known.model}")
            rows = [row["embedding"] for row in answer["data"]]
            self._check_rows(READ["base64"], rows, len(texts), known, places)

        body = {"input": texts, "encoding_format": "base64", "model": known.model}
        return Request("/v1/embeddings base64", size, "/v1/embeddings", body, len(texts), check)

    def similarity(self, known: Known) -> Request:
        """Known texts only, so that every cosine is checked."""
        size, places = self._places(known)
        source, *others = [*places, *self._places(known)[1]]

        def check(cosines: Any) -> None:
            self._check_cosines(cosines, known.vectors[others] @ known.vectors[source])

        inputs = {"source_sentence": known.texts[source], "sentences": [known.texts[place] for place in others]}
        path, body = self._to(known, "/similarity", {"inputs": inputs})
        return Request("/similarity", size, path, body, len(others) + 1, check)

    def search(self, known: Known) -> Request:
        """Known texts only, as in `similarity`."""
        size, places = self._places(known)
        query = self.rng.randrange(len(known.texts))

        def check(hits: Any) -> None:
            hold(sorted(hit["index"] for hit in hits) == list(range(len(places))), "not every text has its place")
            scores = [hit["score"] for hit in hits]
            hold(scores == sorted(scores, reverse=True), "the hits are out of order")
            expected = known.vectors[[places[hit["index"]] for hit in hits]] @ known.vectors[query]
            self._check_cosines(scores, expected)

        inputs = {"query": known.texts[query], "texts": [known.texts[place] for place in places]}
        return Request("/search", size, *self._to(known, "/search", inputs), len(places) + 1, check)

    def tokenize(self, known: Known) -> Request:
        size, places = self._places(known)

        def check(answer: Any) -> None:
            ids = [[token["id"] for token in tokens] for tokens in answer]
            hold(ids == [known.ids[place] for place in places], "the tokens are not those of these texts")
            self.books.checked += len(places)

        body = {"inputs": [known.texts[place] for place in places]}
        return Request("/tokenize", size, *self._to(known, "/tokenize", body), 0, check)

    def _to(self, known: Known, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Name the model in the path or in the body; the default model is not named."""
        if known.model == self.default:
            return path, body
        return self.rng.choice([(f"/models/{known.model}{path}", body), (path, {**body, "model": known.model})])

    def _size(self) -> tuple[str, int]:
        """A size class, and a number of texts within it; small numbers are more frequent."""
        (size,) = self.rng.choices(list(SIZES), SIZE_WEIGHTS)
        low, high = SIZES[size]
        return size, round(low * (high / low) ** self.rng.random())

    def _places(self, known: Known) -> tuple[str, list[int]]:
        """A size class, and positions of known texts."""
        size, count = self._size()
        return size, self.rng.choices(range(len(known.texts)), k=count)

    def _texts(self, known: Known) -> tuple[str, list[str], dict[int, int]]:
        """A size class, texts, and for the known ones among them: position in the request -> position in `known`."""
        size, count = self._size()
        texts = self.rng.choices(self.texts, k=count)
        places = {row: self.rng.randrange(len(known.texts)) for row in range(count) if self.rng.random() < CHECKED}
        for row, place in places.items():
            texts[row] = known.texts[place]
        return size, texts, places

    def _check_rows(self, read: "Reader", rows: Any, count: int, known: Known, places: dict[int, int]) -> None:
        hold(len(rows) == count, f"{len(rows)} rows for {count} texts")
        decoded = np.stack([read.decode(row) for row in rows])
        dimension = known.vectors.shape[1]
        hold(decoded.shape[1] == (-(-dimension // 8) if read.packed else dimension), f"rows of {decoded.shape[1]}")
        hold(bool(np.isfinite(decoded).all()), "a value is not finite")
        if places:
            hold(read.agree(decoded[list(places)], known.vectors[list(places.values())]), "a vector is another text's")
        self.books.checked += len(places)

    def _check_cosines(self, cosines: Any, expected: Vectors) -> None:
        hold(len(cosines) == len(expected), f"{len(cosines)} cosines for {len(expected)} texts")
        hold(bool(np.allclose(cosines, expected, rtol=0, atol=TOLERANCE)), "a cosine is another pair's")
        self.books.checked += len(expected)


class Reader(NamedTuple):
    """One encoding_format: how to decode a row, and how to compare rows with the expected vectors."""

    decode: Callable[[Any], NDArray[Any]]
    agree: Callable[[NDArray[Any], Vectors], bool]
    packed: bool = False


def near(tolerance: float) -> Callable[[NDArray[Any], Vectors], bool]:
    return lambda vectors, expected: bool(np.abs(vectors - expected).max() <= tolerance)


def near_int8(vectors: NDArray[Any], expected: Vectors) -> bool:
    """Each row is scaled by its largest magnitude. The tolerance is 1: half for rounding, half for differences."""
    return bool(np.abs(vectors - expected * 127 / np.abs(expected).max(axis=1, keepdims=True)).max() <= 1)


def same_signs(packed: NDArray[Any], expected: Vectors) -> bool:
    """Compare the signs of all values that are not close to 0."""
    positive = np.unpackbits(packed.astype(np.uint8), axis=1, count=expected.shape[1]).astype(bool)
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


async def deaf(url: str, key: str, texts: list[str], books: Books, until: float) -> None:
    """Ask for megabytes again and again, and do not read them: the service has to end each request at its deadline."""
    host, port = url.removeprefix("http://").split(":")
    content = orjson.dumps({"inputs": texts})
    head = f"POST /embed HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    head += f"x-request-timeout: {DEAF_SECONDS}\r\ncontent-length: {len(content)}\r\n\r\n"
    request = Request("/embed", "deaf", "/embed", {}, len(texts), hold)
    while time.monotonic() < until - DEAF_SECONDS:
        books.note("sent", request)
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(head.encode() + content)
        refused = b" 429 " in await reader.readline()
        books.note("refused" if refused else "left", request)
        await asyncio.sleep(DEAF_SECONDS)
        writer.transport.abort()


async def client(http: httpx.AsyncClient, mix: Mix, key: str, books: Books, started: float, until: float) -> None:
    """Send one request after another. After a 429 the client waits as long as Retry-After says."""
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
