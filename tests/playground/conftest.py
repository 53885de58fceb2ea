"""The machine's own Chromium, and servers to look at. Only where there is none are these tests skipped, and aloud."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from harness import Process
from onnx import numpy_helper
from patience import PATIENCE
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tiny_bundle import graph, write_bundle
from visitor import KEY, Visitor

from cloze.encoding.bundle import Bundle, changing
from cloze.encoding.calibration import CALIBRATION_FILE, Calibration, Curve

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
MILLISECONDS = 1000 * PATIENCE

expect.set_options(timeout=MILLISECONDS)


# Scopes end with the module: while Playwright's synchronous API is open, no other test can start an event loop.


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    command = next(filter(None, map(shutil.which, COMMANDS)), None)
    if command is None:
        pytest.skip(f"No Chromium can be had here: none of {', '.join(COMMANDS)} is on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=command, timeout=MILLISECONDS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two that disagree: in "beta" the last product is with the matrix turned over. "alpha" is calibrated."""
    folder = tmp_path_factory.mktemp("bundles")
    other = graph()
    [matrix] = [weight for weight in other.graph.initializer if weight.name == "matrix"]
    matrix.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(matrix).T.copy(), "matrix"))
    curve = Curve(method="platt", cosines=(-1, 1), values=(0, 5), error_before=0.2, error=0.1)
    calibration = Calibration(
        meaning="score", lowest=0, highest=5, pairs=200, source="pairs.csv", curves={"fp32": curve}
    )
    with changing(Bundle.load(write_bundle(folder / "alpha"))) as alpha:
        (alpha / CALIBRATION_FILE).write_text(calibration.model_dump_json())
    write_bundle(folder / "beta", model=other)
    return folder


def _serve(*arguments: str) -> Iterator[str]:
    server = Process("--threads", "1", *arguments)
    yield server.url
    server.close()


@pytest.fixture(scope="module")
def url(browser: Browser, bundles: Path) -> Iterator[str]:
    yield from _serve("--bundle", str(bundles), "--model", "alpha")


@pytest.fixture(scope="module")
def locked_url(browser: Browser, bundles: Path) -> Iterator[str]:
    yield from _serve("--bundle", str(bundles), "--model", "alpha", "--api-keys", KEY)


@pytest.fixture(scope="module")
def service(url: str) -> Iterator[httpx.Client]:
    """What the page shows is held against what the service answers here."""
    with httpx.Client(base_url=url) as http:
        yield http


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(MILLISECONDS)
    yield page
    context.close()


@pytest.fixture
def visitor(page: Page, url: str) -> Iterator[Visitor]:
    """One at the page of two models, whose visit must end without a complaint of the browser's."""
    visitor = Visitor(page, url)
    visitor.open()
    yield visitor
    visitor.leave()


@pytest.fixture
def locked_out(page: Page, locked_url: str) -> Iterator[Visitor]:
    """One at the page of a service that wants a key."""
    visitor = Visitor(page, locked_url, refusals={401})
    page.goto(locked_url)
    yield visitor
    visitor.leave()
