"""GET /docs: Swagger UI over /openapi.json, from files on this machine instead of a CDN's."""

from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

__all__ = ["assets", "router"]

router = APIRouter(include_in_schema=False)
assets = StaticFiles(directory=str(files("fastapi_offline").joinpath("static")))


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Relative addresses, for a proxy may serve all this under a path of its own."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title=request.app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )
