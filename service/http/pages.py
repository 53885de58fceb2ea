"""Web pages: the playground at / with its files under /playground/, and the API reference at /docs.

Both load files of this machine only, never of a CDN, and call no other service.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

# Not by `mimetypes`, which depends on the machine: with nosniff a script of another type does not run.
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS: Final = {
    "cache-control": "no-cache",  # cached, but revalidated by its ETag
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Asset:
    """A file and its headers."""

    content: bytes
    media_type: str
    etag: str


def _read() -> dict[str, Asset]:
    """Read every file of the page, by its name; no other path is served."""
    assets = {}
    for file in files("service").joinpath("playground").iterdir():
        content, suffix = file.read_bytes(), file.name[file.name.rfind(".") :]
        assets[file.name] = Asset(content, MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return assets


ASSETS: Final = _read()


DOCS_FILES: Final = StaticFiles(directory=str(files("fastapi_offline").joinpath("static")))


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Swagger UI over /openapi.json. Its addresses are relative, since a proxy may serve it under another path."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title=request.app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route("/playground/{name}", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in ASSETS:
        raise HTTPException(404, f"the playground has no file {name!r}")
    asset = ASSETS[name]
    headers = {**HEADERS, "etag": asset.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)
