"""One who uses the page, and writes down what the browser asks for and complains of."""

import re
import time
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from patience import PATIENCE
from playwright.sync_api import ConsoleMessage, Locator, Page, expect

KEY = "a-key-of-some-length"


class Visitor:
    """A visit to `url`; answers of the statuses in `refusals` are expected."""

    def __init__(self, page: Page, url: str, refusals: Iterable[int] = ()) -> None:
        self.page = page
        self.url = url
        self.refusals = set(refusals)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def _hear(self, message: ConsoleMessage) -> None:
        refused = re.search(r"the server responded with a status of (\d+)", message.text)
        if message.type in ("error", "warning") and not (refused and int(refused[1]) in self.refusals):
            self.complaints.append(message.text)

    def open(self) -> None:
        """The page has run its first example when this returns."""
        self.page.goto(self.url)
        table = self.result("compare").get_by_role("table")
        self.wait_until(lambda: table.is_visible() or self.complaints)
        assert self.complaints == []
        self.settle("compare")

    def leave(self) -> None:
        """Nothing was complained of, and nothing went elsewhere, nor any text into an address."""
        assert self.complaints == []
        assert self.requests
        for address in map(urlsplit, self.requests):
            assert f"{address.scheme}://{address.netloc}" == self.url
            assert (address.query, address.fragment) == ("", "")

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for what the browser will tell; Playwright listens to it meanwhile, as it does in every call."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end
            self.page.wait_for_timeout(20)

    def result(self, tool: str) -> Locator:
        return self.page.locator(f"#{tool} .result")

    def settle(self, tool: str) -> None:
        expect(self.result(tool)).not_to_have_attribute("aria-busy", "true")

    def turn_to(self, tool: str) -> None:
        self.page.get_by_role("tab", name=tool.capitalize()).click()
        expect(self.result(tool).locator("> *").first).to_be_visible()
        self.settle(tool)

    def run(self, tool: str, **fields: str) -> None:
        """Fill the tool's fields, by the end of their id, and press its button; returns when it is answered."""
        for name, value in fields.items():
            self.put(self.page.locator(f"#{tool}-{name}"), value)
        with self.page.expect_response(lambda response: response.request.method == "POST"):
            self.page.locator(f"#{tool} button.primary").click()
        self.settle(tool)

    def put(self, field: Locator, text: str) -> None:
        """At once, as a paste does; `fill` inserts line by line, and takes a minute for 2,000 of them."""
        field.evaluate("(field, text) => { field.value = text }", text)

    def alert(self) -> Locator:
        return self.page.get_by_role("alert")
