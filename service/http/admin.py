"""POST /admin/reload. It needs an admin key; where none is configured, the route is closed."""

from fastapi import APIRouter

from encoding.errors import ClozeError
from service.errors import ReloadFailed, documented
from service.http.request import Context
from service.inference.models import Reloaded

router = APIRouter(tags=["admin"], responses=documented(401, 409))


@router.post("/admin/reload", summary="Read the folder of bundles again")
async def reload(context: Context) -> Reloaded:
    """Load new and changed bundles beside the served ones, check them, warm them up and swap: all of them or none."""
    try:
        return await context.services.models.reload()
    except ClozeError as error:
        raise ReloadFailed(f"nothing has changed: {error}") from error
