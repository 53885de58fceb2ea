"""What operators do: POST /admin/reload. Needs an admin key; without one configured it is closed."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from encoding.errors import ClozeError
from service.errors import ErrorBody, ReloadFailed
from service.models import Models

__all__ = ["router"]

RESPONSES: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "An admin key is needed"},
    409: {"model": ErrorBody, "description": "A bundle cannot be served; nothing has changed"},
}

router = APIRouter(tags=["admin"], responses=RESPONSES)


class ReloadReport(BaseModel):
    """Names of models."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    unchanged: list[str]
    default: str


@router.post("/admin/reload", summary="Look at the folder of bundles again")
async def reload(request: Request) -> ReloadReport:
    """Load what is new or changed beside what is served, check it, warm it up, swap; all of it or nothing."""
    models: Models = request.app.state.models
    try:
        found = await models.reload()
    except ClozeError as error:
        raise ReloadFailed(f"nothing has changed: {error}") from error
    return ReloadReport(**found._asdict(), default=models.default)
