"""POST /admin/reload. It needs an admin key; where none is configured, the route is closed."""

from fastapi import APIRouter
from pydantic import BaseModel

from encoding.errors import ClozeError
from service.errors import ReloadFailed, documented
from service.http.request import Context

router = APIRouter(tags=["admin"], responses=documented(401, 409))


class ReloadReport(BaseModel):
    """Names of models."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    unchanged: list[str]
    default: str


@router.post("/admin/reload", summary="Read the folder of bundles again")
async def reload(context: Context) -> ReloadReport:
    """Load new and changed bundles beside the served ones, check them, warm them up and swap: all of them or none."""
    models = context.services.models
    try:
        found = await models.reload()
    except ClozeError as error:
        raise ReloadFailed(f"nothing has changed: {error}") from error
    return ReloadReport(**found._asdict(), default=models.default)
