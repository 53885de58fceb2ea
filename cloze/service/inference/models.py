"""The served models, by name: find one for a request, and replace them while requests are in flight."""

import asyncio
import gc
import logging
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX
from time import perf_counter
from typing import NamedTuple, TypeVar

from pydantic import BaseModel

from cloze.encoding.bridge import Bridge, BridgeError
from cloze.encoding.bundle import SPEC_FILE, Bundle, locate, unreadable
from cloze.encoding.errors import BundleError, ClozeError, OptionError
from cloze.service.errors import ModelNotFound, SessionError, ValidationFailed
from cloze.service.inference.health import HUNG, HUNG_AFTER
from cloze.service.inference.model import Model
from cloze.service.inference.threads import run_in_own_thread
from cloze.service.monitoring.background import Background
from cloze.service.monitoring.logs import end_process
from cloze.service.monitoring.metrics import Metrics
from cloze.service.settings import Settings

Argument = TypeVar("Argument")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Target(NamedTuple):
    """What an alias stands for: a model, and one of its named templates, or None for its own."""

    model: str
    template: str | None


class Reloaded(BaseModel):
    """Names of the models that a reload added, changed, removed or left unchanged, and of the default model."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    unchanged: list[str]
    default: str


class Models:
    """A model for every bundle in `settings.bundle`; one of them is the default."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        background: Background,
        load_model: Callable[[Bundle, Bridge | None], Model],
    ) -> None:
        """Load every bundle, check it and warm it up.

        Raises BundleError, BridgeError or SessionError if one cannot be served, OptionError if the default or an alias
        is not valid. A graph that hangs ends the process.
        """
        self._settings, self._metrics, self._background = settings, metrics, background
        self._load_model = load_model
        self._limit = min(HUNG_AFTER * settings.stall_seconds, TIMEOUT_MAX)  # seconds
        self._reloading = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self.aliases = settings.aliases
        self.served: dict[str, Model] = {}
        bundles = [Bundle.load(folder) for folder in _folders(settings.bundle)]
        bridge = _bridge(settings.bridge)
        _check(settings, bundles, bridge)  # before the graphs are loaded
        for bundle in bundles:
            loading = run_in_own_thread(partial(self._load, bridge, bundle))
            if not wait([loading], self._limit).done:
                problem = "model %s: loading or warming up has hung for %.0f s: the process ends with status %d"
                logger.critical(problem, bundle.name, self._limit, HUNG)
                end_process(HUNG)
            self.served[bundle.name] = loading.result()
        self.default = settings.model or next(iter(self.served))

    def __iter__(self) -> Iterator[Model]:
        return iter(self.served.values())

    def start(self) -> None:
        """Begin to accept requests; needs a running event loop."""
        for model in self:
            model.start(self._metrics)

    def find(self, *names: str | None) -> tuple[Model, str | None]:
        """Return the model with a name or an alias, or the default, and the named template that an alias chooses.

        The caller must lease the model before anything else can run. Raises ModelNotFound, and ValidationFailed if two
        models, or two templates of one, are named.
        """
        aliases, served = self.aliases, self.served
        targets = [_target(aliases[name], served) if name in aliases else Target(name, None) for name in names if name]
        requested = list(dict.fromkeys(target.model for target in targets))
        templates = list(dict.fromkeys(target.template for target in targets if target.template))
        for kind, named in (("models", requested), ("templates", templates)):
            if len(named) > 1:
                message = f"two {kind} are named, {named[0]!r:.200} and {named[1]!r:.200}; name one of them"
                raise ValidationFailed(message, "model")
        model = served.get(requested[0] if requested else self.default)
        if model is None:
            available = ", ".join((*served, *aliases))
            raise ModelNotFound(f"no model {requested[0]!r:.200} is served; the served models are {available}")
        return model, next(iter(templates), None)

    async def stop(self) -> None:
        """Stop every model at the end of its last lease."""
        await asyncio.gather(*self._leaving, *(model.stop() for model in self))

    async def reload(self) -> Reloaded:
        """Read the folder again: load new and changed bundles beside the served ones, check, warm up, swap.

        Requests in flight finish on the model they started on. Raises BundleError, BridgeError, SessionError or
        OptionError if a bundle cannot be served, or a step takes three times `stall_seconds`; then nothing changes.
        """
        async with self._reloading:
            started = perf_counter()
            try:
                served = await self._load_changed()
            except Exception as error:
                self._metrics.reloads.labels("failed").inc()
                bug = not isinstance(error, ClozeError)
                logger.error("the reload failed, nothing has changed: %s", error, exc_info=bug)
                _free(error)
                raise
            reloaded = self._swap(served)
            outcome = "unchanged" if reloaded.unchanged == list(self.served) and not reloaded.removed else "swapped"
            self._metrics.reloads.labels(outcome).inc()
            logger.info("reloaded in %.2f s: %s", perf_counter() - started, reloaded.model_dump())
            return reloaded

    def _swap(self, served: dict[str, Model]) -> Reloaded:
        """Serve these models from now on; the others finish their requests in flight."""
        former, self.served = self.served, served
        self.default = self._settings.model or next(iter(served))
        reloaded = Reloaded(
            added=[name for name in served if name not in former],
            changed=[name for name in served if name in former and former[name] is not served[name]],
            removed=[name for name in former if name not in served],
            unchanged=[name for name in served if former.get(name) is served[name]],
            default=self.default,
        )
        for name in reloaded.removed:
            self._metrics.forget(name)
        for name in reloaded.added + reloaded.changed:
            served[name].start(self._metrics)
        for name in reloaded.removed + reloaded.changed:
            leaving = self._background.once("retire", former[name].stop)
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            # Reference cycles keep a stopped model in memory, and Python rarely collects them by itself.
            leaving.add_done_callback(lambda _: asyncio.get_running_loop().call_soon(gc.collect))
        return reloaded

    async def _load_changed(self) -> dict[str, Model]:
        """Load the folder's bundles. A served model is kept if its bundle is the same, byte for byte."""
        folders = await self._step(_folders, self._settings.bundle)
        bundles = [await self._step(Bundle.load, folder) for folder in folders]
        bridge = await self._step(_bridge, self._settings.bridge)
        _check(self._settings, bundles, bridge)
        kept = {bundle.name: self.served[bundle.name] for bundle in bundles if self._serves(bundle, bridge)}
        changed = [bundle for bundle in bundles if bundle.name not in kept]
        loaded = {bundle.name: await self._step(partial(self._load, bridge), bundle) for bundle in changed}
        return {bundle.name: (kept | loaded)[bundle.name] for bundle in bundles}

    def _serves(self, bundle: Bundle, bridge: Bridge | None) -> bool:
        model = self.served.get(bundle.name)
        return model is not None and model.bundle.spec == bundle.spec and _same(model.bridge, _over(bridge, bundle))

    async def _step(self, step: Callable[[Argument], Result], argument: Argument) -> Result:
        """Run a step of a reload. Raises SessionError if it hangs."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(run_in_own_thread(partial(step, argument))), self._limit)
        except TimeoutError as error:
            path = argument.path if isinstance(argument, Bundle) else argument
            raise SessionError(
                f"{path} was not loaded and warmed up within {self._limit:g} s, which is three times stall_seconds; "
                "try it with `cloze serve --check`, or raise stall_seconds"
            ) from error

    def _load(self, bridge: Bridge | None, bundle: Bundle) -> Model:
        """Load a bundle's graph, check it and warm it up.

        Raises BundleError if the folder changed meanwhile, because the graph may belong to another bundle.
        """
        try:
            model = self._load_model(bundle, _over(bridge, bundle))
            model.warm_up()
            return model
        finally:
            if not bundle.unchanged():
                raise BundleError(f"{bundle.path} changed while it was loaded; reload when the copy is complete")


def _check(settings: Settings, bundles: list[Bundle], bridge: Bridge | None) -> None:
    """Check what needs no graph: the names, and that the bridge fits. Raises OptionError, BridgeError."""
    _check_names(settings, {bundle.name: bundle for bundle in bundles})
    _check_bridge(bridge, bundles)


def _free(error: BaseException) -> None:
    """Free the models loaded before an error, which its traceback's frames and reference cycles keep in memory."""
    cause: BaseException | None = error
    while cause:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    gc.collect()


def _folders(path: Path) -> list[Path]:
    """Return the bundle itself, or the bundles in the folder, sorted by name."""
    path = locate(path)
    try:
        if (path / SPEC_FILE).exists() or not path.is_dir():
            return [path]
        folders = sorted(folder for folder in path.iterdir() if folder.name[0] != "." and _has_spec(folder))
    except OSError as error:
        raise unreadable(path, error) from error
    if not folders:
        raise BundleError(
            f"{path} is not a bundle and contains none: neither it nor a folder in it has {SPEC_FILE}; make a bundle "
            "with `cloze export RUN OUT`"
        )
    return folders


def _has_spec(folder: Path) -> bool:
    """Whether the folder is a bundle. One that cannot be entered, such as a volume's lost+found, is skipped."""
    try:
        return (folder / SPEC_FILE).is_file()
    except PermissionError:
        logger.warning("skipped %s, which cannot be read", folder)
        return False


def _bridge(path: str) -> Bridge | None:
    return Bridge.load(Path(path)) if path else None


def _over(bridge: Bridge | None, bundle: Bundle) -> Bridge | None:
    """Return the bridge if it was made for this bundle."""
    return bridge if bridge and bridge.about.new == bundle.spec.space else None


def _same(first: Bridge | None, second: Bridge | None) -> bool:
    return (first and first.sha256) == (second and second.sha256)


def _check_bridge(bridge: Bridge | None, bundles: list[Bundle]) -> None:
    if bridge and not any(_over(bridge, bundle) for bundle in bundles):
        spaces = ", ".join(f"{bundle.name} {bundle.spec.space}" for bundle in bundles)
        raise BridgeError(
            f"the bridge leads from space {bridge.about.new} to {bridge.about.old}, but the models have {spaces}; "
            "make one with `cloze bridge OLD NEW OUT`, or serve without a bridge"
        )


def _target(words: str, names: Container[str]) -> Target:
    """Read MODEL or MODEL:TEMPLATE; a model's own name may have a colon."""
    model, colon, template = words.rpartition(":")
    return Target(model.strip(), template.strip()) if colon and words not in names else Target(words, None)


def _check_names(settings: Settings, bundles: Mapping[str, Bundle]) -> None:
    listed = ", ".join(bundles)
    if settings.model and settings.model not in bundles:
        raise OptionError(f"model is {settings.model!r}, but {settings.bundle} has {listed}; name one of these")
    for alias, words in settings.aliases.items():
        name, template = _target(words, bundles)
        if name not in bundles:
            raise OptionError(f"alias is {alias}={words}, but {settings.bundle} has {listed}; name one of these")
        if template is not None and template not in bundles[name].named:
            templates = ", ".join(bundles[name].named) or "none"
            raise OptionError(f"alias is {alias}={words}; the named templates of model {name} are: {templates}")
        if alias in bundles:
            raise OptionError(
                f"alias is {alias}={words}, but {settings.bundle} has a model {alias}; choose another name"
            )
    if not settings.model and len(bundles) > 1:
        raise OptionError(f"{settings.bundle} has several models and no default; set model to one of {listed}")
