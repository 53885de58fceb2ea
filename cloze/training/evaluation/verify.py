"""cloze verify URL MODEL: check whether a server gives the vectors of a model, and if not, find out why.

A wrong pooling, a missing Dense layer or a forgotten prompt often goes unnoticed. The reference is the bundle's graph,
or sentence-transformers itself. If the server's vectors differ from the reference, the same model is tried with another
pooling, prompt or length, without its last layers or without its template, until one of these variants agrees.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cloze.command import run
from cloze.encoding.bundle import DTYPES, SPEC_FILE, Bundle, Precision, locate
from cloze.encoding.errors import TemplateError
from cloze.encoding.template import TEXT, Template
from cloze.encoding.text import TextEncoder
from cloze.options import Options, key_of
from cloze.training.bar import bar
from cloze.training.errors import EncoderError, ServerError
from cloze.training.evaluation.measures import Embed, cosines, units
from cloze.training.evaluation.server import client_of, unreachable
from cloze.training.model.graph_encoder import GraphEncoder

Api = Literal["tei", "openai", "cohere"]

PLAIN: Final = (
    "A man plays a guitar on stage.",
    "Two dogs run over a green field.",
    "Why does the price of oil rise when supply falls?",
    "The committee will meet again on Monday.",
    "No tickets are left for tonight.",
    "Rain is expected in the north",
)
UNUSUAL: Final = {
    "capitals": "THE QUEEN OPENED PARLIAMENT",
    "accents": "Zürich, São Paulo and Málaga",
    "other scripts": "東京 and Москва",
    "an emoji": "A guitar 🎸 for sale",
    "line breaks": "first line\nsecond line\n\n\tthird",
    "blanks at the ends": "   a text between blanks   ",
    "digits and signs": "Invoice no. 2024-117: 3,499.00 EUR (31 May)",
}
SPECIAL: Final = "The words [MASK], [SEP] and <mask> are text."
LONG: Final = "The committee met again, and the minutes were longer than before. " * 120  # 1,500 tokens and more
LENGTHS: Final = (32, 64, 128, 192, 256, 384, 512, 1024)  # tokens, tried if the server truncates to another length
POOLINGS: Final = ("mean", "cls", "max", "lasttoken", "weightedmean")
QUANTISED: Final = 0.98  # cosine that int8 weights reach
UNIT: Final = 1e-2  # the largest difference of a normalised vector's length from 1, also in half precision


class VerifyOptions(Options):
    """Compare a server's vectors with those of a model. Exit code 1 if something differs."""

    url: CliPositionalArg[str] = Field(description="URL of the server, http://HOST:PORT, or of one of its routes")
    model: CliPositionalArg[Path] = Field(description="folder of a bundle or of a sentence-transformers model")
    api: Literal["auto", "tei", "openai", "cohere"] = Field(
        "auto", description="wire format. auto: all that the server has"
    )
    served_name: str = Field("", description="name of the model in requests (default: the first that the server lists)")
    least_cosine: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.999,
        description=f"lowest cosine that counts as agreement; give {QUANTISED} for a server with quantised weights",
    )
    key_file: Path | None = Field(None, description="file with the API key")


class Check(NamedTuple):
    """What was compared, whether it agrees (None: undecided), and the result in words."""

    name: str
    agrees: bool | None
    result: str


@dataclass(frozen=True)
class Reference:
    """A model: its vectors (n, d), as it gives them, and variants of the model with one or more changes."""

    embed: Embed
    variants: Callable[[], Iterator[tuple[str, Embed]]]
    at_length: Callable[[int], Embed | None]  # truncated to that many tokens; None if the model has fewer positions
    normalises: bool


@dataclass(frozen=True)
class Route:
    """A wire format: its possible paths, its body for texts, and the vectors in its response."""

    paths: tuple[str, ...]
    body: Callable[[list[str], str], dict[str, Any]]
    read: Callable[[Any], list[list[float]]]


ROUTES: Final[dict[Api, Route]] = {
    "tei": Route(("/embed",), lambda texts, _: {"inputs": texts, "truncate": True}, lambda answer: list(answer)),
    "openai": Route(
        ("/v1/embeddings", "/embeddings"),
        lambda texts, name: {"input": texts, "model": name, "encoding_format": "float"},
        lambda answer: [row["embedding"] for row in sorted(answer["data"], key=lambda row: int(row["index"]))],
    ),
    "cohere": Route(
        ("/v2/embed",),
        lambda texts, name: {
            "texts": texts, "model": name, "input_type": "clustering", "embedding_types": ["float"], "truncate": "END",
        },
        lambda answer: list(answer["embeddings"]["float"]),
    ),
}  # fmt: skip


class Server:
    """One wire format of a server."""

    def __init__(self, client: httpx.Client, api: Api, path: str, name: str) -> None:
        self._client, self.api, self._path, self._name = client, api, path, name

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Texts -> vectors (n, d), as the server sends them, from one request. Raises ServerError."""
        route = ROUTES[self.api]
        base = str(self._client.base_url).rstrip("/")
        where = f"{base}{self._path}"
        try:
            response = self._client.post(self._path, json=route.body(list(texts), self._name))
        except httpx.TransportError as error:
            raise ServerError(unreachable(base, error)) from error
        if not response.is_success:
            raise ServerError(f"{where} answered {response.status_code}: {' '.join(response.text.split())[:200]}")
        try:
            vectors = np.array(route.read(response.json()), dtype=np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{where} did not return vectors; choose another --api") from error
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ServerError(
                f"{where} returned an array of shape {vectors.shape} for {len(texts)} texts; choose another --api"
            )
        return vectors


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if something differs. Raises ClozeError."""
    options = VerifyOptions.parse(arguments, "cloze verify")
    key = key_of(options.key_file)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    reference = reference_of(options.model)
    base, places = _address(options)
    client = client_of(base, headers)
    try:
        client.base_url = base
    except httpx.InvalidURL as error:
        raise ServerError(f"{options.url} is not an address ({error}); write http://HOST:PORT") from error
    with client:
        servers = _servers(client, places, options.served_name)
        reference = reference_of(options.model, _served_dtype(client))
        checks_by_api = {server.api: checks(server, reference, options.least_cosine) for server in servers}
    table = Table("", "", *([""] if len(checks_by_api) > 1 else []), show_header=False)
    for name, rows in checks_by_api.items():
        for check in rows:
            mark = {True: "[green]agrees[/]", False: "[red]differs[/]", None: ""}[check.agrees]
            table.add_row(
                *([name] if len(checks_by_api) > 1 else []),
                escape(check.name),
                f"{mark} {escape(check.result)}".strip(),
            )
    Console(soft_wrap=False, highlight=False).print(table)
    return int(any(check.agrees is False for rows in checks_by_api.values() for check in rows))


def checks(server: Server, reference: Reference, threshold: float) -> list[Check]:
    """All comparisons. Raises ServerError if the server refuses a plain text."""
    sent, expected = server.embed(PLAIN), reference.embed(PLAIN)
    width, right = sent.shape[1], expected.shape[1]
    if width != right:
        return [Check("dimensions", False, f"{width}, but the model has {right}")]
    cosine = _least_cosine(sent, expected)
    rows = [
        Check("dimensions", True, str(width)),
        Check("vectors", cosine >= threshold, f"least cosine of {len(PLAIN)} texts {cosine:.5f}"),
    ]
    if cosine < threshold:
        rows.append(Check("what it gives instead", None, _instead(sent, reference, cosine, threshold)))
        return [*rows, _lengths_one(sent, reference), _batches(server, threshold)]
    others = bar((_unusual, _special, _truncation), desc="comparing", unit=" checks")
    compared = [check(server, reference, threshold) for check in others]
    return [*rows, _lengths_one(sent, reference), *compared, _batches(server, threshold)]


def reference_of(path: Path, dtype: str = "") -> Reference:
    """The model in a folder. For a bundle, the graph that the server reports, or the most exact. Raises ClozeError."""
    path = locate(path)
    if (path / SPEC_FILE).is_file():
        bundle = Bundle.load(path)
        served = [name for name in bundle.precisions if DTYPES[name] == dtype]
        return _of_bundle(bundle, (*served, *bundle.precisions)[0])
    return _of_library(path)


def _least_cosine(sent: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    return float(cosines(sent, expected).min())


def _instead(sent: NDArray[np.float32], reference: Reference, unchanged: float, threshold: float) -> str:
    """A message that names the first variant that agrees, or else the nearest of the model itself and its variants.

    `unchanged` is the least cosine with the model itself.
    """
    best, nearest = unchanged + 0.01, ""
    for name, embed in bar(list(reference.variants()), desc="searching", unit=" variants"):
        vectors = embed(PLAIN)
        if vectors.shape != sent.shape:
            continue
        cosine = _least_cosine(sent, vectors)
        if cosine >= threshold:
            return f"the model {name} (least cosine {cosine:.5f})"
        if cosine > best:
            best, nearest = cosine, name
    if unchanged >= QUANTISED and not nearest:
        return f"the model itself with less precision, as from quantised weights: pass --least-cosine {QUANTISED}"
    known = f"; the nearest is the model {nearest} ({best:.3f})" if nearest else ""
    return f"no known variant of the model{known}: is it another model?"


def _lengths_one(sent: NDArray[np.float32], reference: Reference) -> Check:
    lengths = np.linalg.norm(sent, axis=1)
    normalised = bool(np.abs(lengths - 1).max() <= UNIT)
    if normalised:
        return Check("length 1", True, "every vector is normalised")
    extent = f"lengths of {lengths.min():.3g} to {lengths.max():.3g}"
    if reference.normalises:
        return Check("length 1", False, f"{extent}, but the model normalises")
    return Check("length 1", None, f"{extent}: normalise them, or compare by cosine, not by dot product")


def _unusual(server: Server, reference: Reference, threshold: float) -> Check:
    """One request per text, so that a refusal belongs to that text."""
    problems = []
    for name, text in UNUSUAL.items():
        try:
            cosine = _least_cosine(server.embed([text]), reference.embed([text]))
        except ServerError as error:
            problems.append(f"{name}: {error}")
        else:
            if cosine < threshold:
                problems.append(f"{name}: cosine {cosine:.3f}")
    return Check("unusual texts", not problems, "; ".join(problems) or ", ".join(UNUSUAL))


def _special(server: Server, reference: Reference, threshold: float) -> Check:
    """Both results are correct: sentence-transformers reads special tokens in a text as such, Cloze as words."""
    try:
        cosine = _least_cosine(server.embed([SPECIAL]), reference.embed([SPECIAL]))
    except ServerError as error:
        return Check("[MASK] in a text", False, f"is refused: {error}")
    if cosine >= threshold:
        return Check("[MASK] in a text", True, "is read as the model reads it")
    return Check("[MASK] in a text", None, f"is read differently, as words or as the token (cosine {cosine:.3f})")


def _truncation(server: Server, reference: Reference, threshold: float) -> Check:
    """Compare a text that is longer than any model's limit."""
    try:
        sent = server.embed([LONG])
    except ServerError as error:
        return Check("a long text", False, f"is refused, but the model truncates it: {error}")
    cosine = _least_cosine(sent, reference.embed([LONG]))
    if cosine >= threshold:
        return Check("a long text", True, f"is truncated where the model truncates (cosine {cosine:.5f})")
    for length in LENGTHS:
        embed = reference.at_length(length)
        if embed is not None and _least_cosine(sent, embed([LONG])) >= threshold:
            return Check("a long text", False, f"is truncated to {length} tokens (cosine with the model {cosine:.3f})")
    return Check("a long text", False, f"cosine {cosine:.3f}; it is truncated elsewhere")


def _batches(server: Server, threshold: float) -> Check:
    """Compare a text alone with the same text in a batch with a long one."""
    alone = units(server.embed(PLAIN[:1]))[0]
    try:
        beside = units(server.embed([LONG, PLAIN[0]]))[1]
    except ServerError:
        beside = units(server.embed([max(PLAIN, key=len), PLAIN[0]]))[1]
    difference = float(np.abs(alone - beside).max())
    if difference == 0:
        return Check("the same in any batch", True, "to the last bit")
    agrees = float(alone @ beside) >= threshold
    return Check("the same in any batch", agrees, f"largest difference of a component {difference:.1e}")


# Servers


def _address(options: VerifyOptions) -> tuple[str, list[tuple[Api, str]]]:
    """The server's address without a route, and the wire formats with the paths to try."""
    url = options.url.rstrip("/")
    chosen_api = None if options.api == "auto" else options.api
    places = [(api, path) for api, route in ROUTES.items() for path in route.paths]
    for api, path in sorted(places, key=lambda place: -len(place[1])):  # /v2/embed also ends with /embed
        if url.endswith(path):
            base, places = url.removesuffix(path), places if chosen_api not in (None, api) else [(api, path)]
            break
    else:
        base, chosen_api = url.removesuffix("/v1"), chosen_api or ("openai" if url.endswith("/v1") else None)
    return base, [place for place in places if chosen_api in (None, place[0])]


def _servers(client: httpx.Client, places: Sequence[tuple[Api, str]], name: str) -> list[Server]:
    """For each wire format, the first path that answers a test text. Raises ServerError if none does."""
    name = name or _served_name(client)
    servers, problems = dict[Api, Server](), []
    for api, path in places:
        if api not in servers:
            server = Server(client, api, path, name)
            try:
                server.embed(PLAIN[:1])
            except ServerError as error:
                problems.append(str(error))
            else:
                servers[api] = server
    if not servers:
        raise ServerError("; ".join(dict.fromkeys(problems)))
    return list(servers.values())


def _served_name(client: httpx.Client) -> str:
    for path in ("/v1/models", "/models"):
        with suppress(httpx.TransportError, KeyError, TypeError, ValueError, IndexError):
            return str(client.get(path).json()["data"][0]["id"])
    return "default"


def _served_dtype(client: httpx.Client) -> str:
    """The dtype that a Cloze server reports for its graph; empty for other servers."""
    with suppress(httpx.TransportError, KeyError, TypeError, ValueError):
        return str(client.get("/info").json()["model_dtype"])
    return ""


# Models


def _of_bundle(bundle: Bundle, precision: Precision) -> Reference:
    encoder = GraphEncoder.of(bundle, precision)
    own = bundle.text_encoder

    def variants() -> Iterator[tuple[str, Embed]]:
        for name, text_encoder in bundle.named.items():
            yield f"with its template {name}", encoder.within(text_encoder).embed
        if own.mask_index is None and str(own.template) != TEXT:
            plain = own.within(Template.parse(TEXT, bundle.spec.pooling))
            yield "without its template", encoder.within(plain).embed
        changed = TextEncoder.load(bundle.path, own.template, own.max_tokens, not own.final_period)
        yield f"{'without' if own.final_period else 'with'} a final period", encoder.within(changed).embed

    def at_length(tokens: int) -> Embed | None:
        if tokens >= own.max_tokens:
            return None
        try:
            return encoder.within(TextEncoder.load(bundle.path, own.template, tokens, own.final_period)).embed
        except TemplateError:  # the template alone exceeds the limit
            return None

    return Reference(encoder.embed, variants, at_length, normalises=False)


def _of_library(path: Path) -> Reference:
    """A model that sentence-transformers loads, without running the model's own code."""
    if not (path / "modules.json").is_file():
        raise EncoderError(
            f"{path} is neither a bundle nor a sentence-transformers model (it has neither {SPEC_FILE} nor "
            "modules.json); give the folder of one"
        )
    from cloze.training.model.encoder import loading

    with loading(str(path), "a sentence-transformers model"):
        library = import_module("sentence_transformers")
        pooling_of = import_module("sentence_transformers.sentence_transformer.modules").Pooling
        model = library.SentenceTransformer(str(path), device="cpu", local_files_only=True)
    modules = list(model)
    place = next((place for place, module in enumerate(modules) if type(module).__name__ == "Pooling"), None)
    before, read, rest = modules[: place or 0], modules[place or 0], modules[(place or 0) + 1 :]  # static: no Pooling
    prompts: dict[str, str | None] = {"": None} | {
        f"with the prompt {name}": text for name, text in model.prompts.items() if text
    }
    if model.default_prompt_name:
        prompts["without its prompt"] = ""
    layers = [module for module in rest if type(module).__name__ != "Normalize"]

    def embed(encoder: Any, prompt: str | None = None) -> Embed:
        return lambda texts: np.asarray(encoder.encode(list(texts), prompt=prompt, show_progress_bar=False))

    def variants() -> Iterator[tuple[str, Embed]]:
        poolings = {"": read}
        if place is not None:
            poolings |= {
                f"with {mode} pooling": pooling_of(read.embedding_dimension, mode)
                for mode in POOLINGS
                if mode != read.pooling_mode
            }
        ends = {"": rest} | ({f"without its {_named(layers)}": []} if layers else {})
        changed = product(poolings.items(), ends.items(), prompts.items())
        for combination in sorted(changed, key=lambda combination: sum(bool(name) for name, _ in combination)):
            (pooled, module), (ended, end), (prompted, prompt) = combination
            name = ", ".join(filter(None, (pooled, ended, prompted)))
            if name:
                variant = library.SentenceTransformer(modules=[*before, module, *end], device="cpu")
                yield name, embed(variant, prompt)

    def at_length(tokens: int) -> Embed | None:
        def truncated(texts: Sequence[str]) -> NDArray[np.float32]:
            own, model.max_seq_length = model.max_seq_length, tokens
            try:
                return embed(model)(texts)
            finally:
                model.max_seq_length = own

        config = getattr(getattr(modules[0], "auto_model", None), "config", None)  # a static model has no limit
        return truncated if config and tokens <= getattr(config, "max_position_embeddings", tokens) else None

    return Reference(embed(model), variants, at_length, normalises=len(layers) < len(rest))


def _named(layers: Sequence[Any]) -> str:
    return " and ".join(dict.fromkeys(type(layer).__name__ for layer in layers))


if __name__ == "__main__":
    sys.exit(run(main))
