"""Web pages: the playground at / with its files under /playground/, and the API reference at /docs.

Both load files from this machine only, never from a CDN, and call no other service.
"""

import mimetypes
from importlib.resources import files
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from cloze.service.routes import DOCS, ROOT

HEADERS: Final = {
    "cache-control": "no-cache",  # cached, but revalidated by its ETag
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
}

for suffix, media_type in ((".css", "text/css"), (".js", "text/javascript"), (".svg", "image/svg+xml")):
    mimetypes.add_type(media_type, suffix)  # a machine's own table may differ: with nosniff the script would not run

router = APIRouter(include_in_schema=False)


class Playground(StaticFiles):
    """The files of the page, with HEADERS."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


PLAYGROUND: Final = Playground(directory=str(files("cloze.service").joinpath("playground")))
DOCS_FILES: Final = StaticFiles(directory=str(files("fastapi_offline").joinpath("static")))


@router.api_route(DOCS.path, methods=["GET", "HEAD"])
async def docs(request: Request) -> HTMLResponse:
    """Swagger UI over /openapi.json. Its addresses are relative, since a proxy may serve it under another path."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title=request.app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )


@router.api_route(ROOT.path, methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return await PLAYGROUND.get_response("index.html", request.scope)
