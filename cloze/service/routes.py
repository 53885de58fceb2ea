"""The routes of the service: the one table that routers, middleware, metrics and errors read."""

import re
from dataclasses import dataclass
from typing import Final, Literal

Shape = Literal["native", "openai", "cohere"]  # of an error, as the clients of a route expect it


@dataclass(frozen=True)
class Route:
    """A path in FastAPI's notation, and the properties of its requests."""

    path: str
    posts: bool = False  # takes texts or token ids, by POST only
    embeds: bool = False  # runs a model: its latency is measured
    of_model: bool = False  # exists under /models/NAME too
    public: bool = False  # GET and HEAD need no API key


ROOT: Final = Route("/", posts=True, embeds=True, public=True)  # GET returns the page; POST exists at /models/NAME too
EMBED: Final = Route("/embed", posts=True, embeds=True, of_model=True)
SIMILARITY: Final = Route("/similarity", posts=True, embeds=True, of_model=True)
SEARCH: Final = Route("/search", posts=True, embeds=True, of_model=True)
EXPLAIN: Final = Route("/explain", posts=True, embeds=True, of_model=True)
PREDICT: Final = Route("/predict", posts=True, embeds=True, of_model=True)
OPENAI: Final = Route("/v1/embeddings", posts=True, embeds=True, of_model=True)
COHERE: Final = Route("/v2/embed", posts=True, embeds=True, of_model=True)
TOKENIZE: Final = Route("/tokenize", posts=True, of_model=True)
DECODE: Final = Route("/decode", posts=True, of_model=True)
INFO: Final = Route("/info", of_model=True)
MODELS: Final = Route("/v1/models", of_model=True)
MODEL: Final = Route("/v1/models/{model}")
HEALTH: Final = Route("/health", of_model=True, public=True)
READY: Final = Route("/health/ready", public=True)
LIVE: Final = Route("/health/live", public=True)
STARTUP: Final = Route("/health/startup", public=True)
METRICS: Final = Route("/metrics", public=True)
RELOAD: Final = Route("/admin/reload")
DOCS: Final = Route("/docs", public=True)
DOCS_FILES: Final = Route("/docs/{name}", public=True)
SCHEMA: Final = Route("/openapi.json", public=True)
PLAYGROUND: Final = Route("/playground/{name}", public=True)
ROUTES: Final = (
    ROOT, EMBED, SIMILARITY, SEARCH, EXPLAIN, PREDICT, OPENAI, COHERE, TOKENIZE, DECODE, INFO, MODELS, MODEL, HEALTH,
    READY, LIVE, STARTUP, METRICS, RELOAD, DOCS, DOCS_FILES, SCHEMA, PLAYGROUND,
)  # fmt: skip

PAGE: Final = "GET /"  # the label of the page
OTHER: Final = "other"  # the label of every path that is not a route
LABELS: Final = (*(route.path for route in ROUTES), PAGE, OTHER)
POST_ROUTES: Final = tuple(route.path for route in ROUTES if route.posts)
MODEL_ROUTES: Final = tuple(route.path for route in ROUTES if route.embeds)
PUBLIC: Final = tuple(re.sub(r"{\w+}", "*", route.path) for route in ROUTES if route.public)
ALIASES: Final = {"/embeddings": OPENAI.path, "/models": MODELS.path}
PATTERNS: Final = {route.path[: route.path.index("{")]: route.path for route in ROUTES if "{" in route.path}
UNDER_MODEL: Final = "|".join([*(route.path for route in ROUTES if route.of_model), *ALIASES, f"{MODELS.path}/.+"])
NAME: Final = "[^/]+(?:/[^/]+)*?"  # of a model; an alias may have slashes
OF_MODEL: Final = re.compile(f"/models/(?:({NAME})({UNDER_MODEL})|([^/]+))")


def resolve(method: str, path: str) -> tuple[str, str | None]:
    """Return the path of the route that serves a request's path, and the model that the path names."""
    if not path.isprintable():  # Starlette's patterns end before a last newline
        return OTHER, None
    if path.startswith("/models/") and (match := OF_MODEL.fullmatch(path)):
        under, route_path, alone = match.groups()
        name = alone or under
        if not route_path and method != "POST":
            return f"{MODELS.path}/{name}", None
        route_path = ALIASES.get(route_path, route_path) or ROOT.path
        return route_path, None if route_path.startswith(f"{MODELS.path}/") else name
    return ALIASES.get(path, path), None


def meant(path: str) -> str | None:
    """Return the path that is probably meant by one with doubled slashes or a final one; None if there is none."""
    if path.startswith("/models//"):  # the name of the model is missing
        return None
    plain = re.sub("/+", "/", path).rstrip("/") or ROOT.path
    return plain if plain != path and label("POST", resolve("POST", plain)[0]) != OTHER else None


def label(method: str, path: str) -> str:
    """Return the metrics' label for the route of a resolved path, even if the request did not reach it."""
    under, slash, name = path.rpartition("/")
    if path.startswith(f"{MODELS.path}/"):
        under = MODELS.path  # the name of an alias may have slashes
    route_path = path if path in LABELS else PATTERNS.get(under + slash, OTHER) if name else OTHER
    if method == "POST" or route_path not in POST_ROUTES:
        return route_path
    return PAGE if path == ROOT.path and method in ("GET", "HEAD") else OTHER


def shape_of(path: str) -> Shape:
    """Return the shape in which the clients of a path expect an error, even if it is not a route."""
    version = re.match(rf"(?:/models/{NAME})?/(v1|v2)/|(/embeddings)$", path)
    return "native" if version is None else "cohere" if version[1] == "v2" else "openai"
