"""The playground: GET / and the files it is made of, under /playground/. It talks to the service's own routes only."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response

__all__ = ["router"]

# By hand: `mimetypes` asks the machine, and with nosniff a script of another type does not run.
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS: Final = {
    "cache-control": "no-cache",  # kept, and asked for by its ETag: an update shows at once
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Asset:
    """A file as it is answered."""

    content: bytes
    media_type: str
    etag: str


def _read() -> dict[str, Asset]:
    """Every file of the page, by its name; no other path can be asked for."""
    assets = {}
    for file in files("service").joinpath("playground").iterdir():
        content, suffix = file.read_bytes(), file.name[file.name.rfind(".") :]
        assets[file.name] = Asset(content, MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return assets


ASSETS: Final = _read()


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return _answer(request, ASSETS["index.html"])


@router.api_route("/playground/{name}", methods=["GET", "HEAD"])
async def asset(name: str, request: Request) -> Response:
    if name not in ASSETS:
        raise HTTPException(404, f"the playground has no file {name!r}")
    return _answer(request, ASSETS[name])


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**HEADERS, "etag": asset.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)
