"""The models that are served, by name; and their change for others while requests go on."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Self

from encoding.bundle import SPEC_FILE, Bundle, unreadable
from encoding.errors import BundleError, ClozeError
from service.admission import Admission
from service.cache import Cache
from service.device import Device
from service.embedder import Embedder
from service.errors import BadSettings, ModelNotFound
from service.health import limited
from service.metrics import Metrics
from service.settings import Settings

__all__ = ["Models", "Reloaded"]

logger = logging.getLogger(__name__)


class Reloaded(NamedTuple):
    """Names of the models that a reload changed, and of those it left as they were."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    unchanged: list[str]


class Models:
    """Every bundle in `settings.bundle` at work, one of them the default."""

    def __init__(
        self, settings: Settings, metrics: Metrics, device: Device, admission: Admission, cache: Cache
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._device = device
        self._admission = admission
        self._cache = cache
        self._served: dict[str, Embedder] = {}
        self.default = ""
        self._reloading = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    @classmethod
    def load(cls, settings: Settings, metrics: Metrics, device: Device, admission: Admission, cache: Cache) -> Self:
        """Load every bundle, check it and warm it up.

        Raises BundleError or SessionError where one cannot be served, BadSettings where the default is not clear. A
        graph that hangs ends the process.
        """
        models = cls(settings, metrics, device, admission, cache)
        models._take(models._load())
        for embedder in models:
            with limited(settings.stall_seconds + settings.fault_seconds, f"model {embedder.name}: warming up"):
                embedder.warm_up()
        return models

    def __iter__(self) -> Iterator[Embedder]:
        return iter(self._served.values())

    @property
    def names(self) -> list[str]:
        return list(self._served)

    def get(self, name: str | None) -> Embedder:
        """The model of that name, the default for None. Raises ModelNotFound, which lists what is served."""
        found = self._served.get(name or self.default)
        if found is None:
            raise ModelNotFound(f"no model {name!r:.200} is served; there are {', '.join(self.names)}")
        return found

    def start(self) -> None:
        """Begin to take requests; needs a running loop."""
        for embedder in self:
            embedder.start(self._metrics)

    async def stop(self) -> None:
        """Finish what has been accepted."""
        self._admission.close()
        await asyncio.gather(*self._leaving, *(embedder.stop() for embedder in self))

    async def reload(self) -> Reloaded:
        """Look at the folder again: load what is new or changed beside what is served, check it, warm it up, swap.

        Requests that have begun end on the model that they began with. Raises BundleError, SessionError or
        BadSettings where any of it cannot be served; then nothing changes.
        """
        async with self._reloading:
            started = perf_counter()
            try:
                served = await self._prepare()
            except Exception as error:
                self._metrics.reloaded("failed")
                bug = not isinstance(error, ClozeError)
                logger.error("the reload failed, nothing has changed: %s", error, exc_info=bug)
                raise
            found = self._swap(served)
            self._metrics.reloaded("unchanged" if found.unchanged == self.names and not found.removed else "swapped")
            logger.info("reloaded in %.2f s: %s", perf_counter() - started, found._asdict())
            return found

    async def _prepare(self) -> dict[str, Embedder]:
        """What the folder holds now, ready to serve."""
        served = await self._device.work(self._load)
        _default(self._settings, served)
        for embedder in served.values():
            if embedder not in self:
                await self._device.run(embedder.warm_up)
        return served

    def _swap(self, served: dict[str, Embedder]) -> Reloaded:
        """Serve these from now on; what is no longer served finishes what it has begun."""
        former = self._served
        self._take(served)
        for embedder in served.values():
            if embedder not in former.values():
                embedder.start(self._metrics)
        for embedder in former.values():
            if embedder not in served.values():
                self._dismiss(embedder)
        return _compare(former, served)

    def _load(self) -> dict[str, Embedder]:
        """What the folder holds now; an embedder at work is kept where its bundle is the same, byte for byte."""
        served = {}
        for folder in _folders(self._settings.bundle):
            bundle = Bundle.load(folder)
            known = self._served.get(bundle.name)
            if known is None or known.bundle.spec != bundle.spec:
                known = Embedder.load(bundle, self._settings, self._device, self._admission, self._cache)
                if not bundle.unchanged():  # its graph may be the other's
                    raise BundleError(f"{folder} was exchanged while it was loaded; reload once that is done")
            served[bundle.name] = known
        return served

    def _take(self, served: dict[str, Embedder]) -> None:
        self.default = _default(self._settings, served)
        for gone in self._served.keys() - served.keys():
            self._metrics.forget(gone)
        self._served = served

    def _dismiss(self, embedder: Embedder) -> None:
        task = asyncio.create_task(embedder.stop())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def _folders(path: Path) -> list[Path]:
    """The bundle itself, or the bundles in it by name."""
    try:
        if (path / SPEC_FILE).exists() or not path.is_dir():
            return [path]
        found = sorted(folder for folder in path.iterdir() if folder.name[0] != "." and (folder / SPEC_FILE).is_file())
    except OSError as error:
        raise unreadable(path, error) from error
    if not found:
        raise BundleError(
            f"{path} is no bundle and holds none: there is no {SPEC_FILE} in it or in a folder of it; make a bundle "
            "with `python -m training.export RUN OUT`"
        )
    return found


def _default(settings: Settings, served: dict[str, Embedder]) -> str:
    names = ", ".join(served)
    if settings.model:
        if settings.model not in served:
            raise BadSettings(f"model is {settings.model!r}, and {settings.bundle} has {names}")
        return settings.model
    if len(served) > 1:
        raise BadSettings(f"{settings.bundle} has several models and none is the default; set model to one of {names}")
    return next(iter(served))


def _compare(former: dict[str, Embedder], served: dict[str, Embedder]) -> Reloaded:
    return Reloaded(
        added=[name for name in served if name not in former],
        changed=[name for name in served if name in former and former[name] is not served[name]],
        removed=[name for name in former if name not in served],
        unchanged=[name for name in served if former.get(name) is served[name]],
    )
