"""The playground over HTTP: its files, their types, their caching, and what they forbid a browser."""

import re
from importlib.resources import files
from pathlib import PurePosixPath

import httpx
import pytest

pytestmark = pytest.mark.anyio

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FOLDER = files("cloze.service").joinpath("playground")
NAMES = sorted(file.name for file in FOLDER.iterdir())


def text(name: str) -> str:
    return FOLDER.joinpath(name).read_text("utf-8")


async def test_the_page_is_at_the_root(both: httpx.AsyncClient) -> None:
    response = await both.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == TYPES[".html"]
    assert "<title>Cloze playground</title>" in response.text


async def test_every_file_is_served_as_what_it_is(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            response = await both.get(f"/playground/{name}")
            assert response.status_code == 200
            assert response.headers["content-type"] == TYPES[PurePosixPath(name).suffix]
            assert response.content == FOLDER.joinpath(name).read_bytes()


@pytest.mark.parametrize("path", ["/", "/playground/playground.js"])
async def test_a_browser_may_do_no_more_than_the_page_needs(both: httpx.AsyncClient, path: str) -> None:
    fresh = await both.get(path)
    known = await both.get(path, headers={"if-none-match": fresh.headers["etag"]})
    for response in (fresh, known):
        policy = dict(each.strip().split(" ", 1) for each in response.headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'self'",
            "object-src": "'none'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert "set-cookie" not in response.headers


async def test_a_file_that_has_not_changed_is_not_sent_again(both: httpx.AsyncClient) -> None:
    fresh = await both.get("/playground/playground.css")
    etag = fresh.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = await both.get("/playground/playground.css", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    changed = await both.get("/playground/playground.css", headers={"if-none-match": '"other"'})
    assert fresh.headers["cache-control"] == "no-cache"
    assert (changed.status_code, changed.content) == (200, fresh.content)


async def test_head_is_get_without_the_body(both: httpx.AsyncClient) -> None:
    for path in ("/", "/playground/icon.svg"):
        got, head = await both.get(path), await both.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(got.content))
        assert head.headers["etag"] == got.headers["etag"]


async def test_nothing_else_can_be_asked_for(both: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for name in ["no.js", "..%2Fsettings.py", "%2e%2e%2fsettings.py", "index.html%00", "INDEX.HTML", ""]:
        with subtests.test(name=name):
            response = await both.get(f"/playground/{name}")
            assert response.status_code == 404
            assert response.json()["error_type"] == "NotFound"


async def test_posts_to_the_root_are_still_the_service(both: httpx.AsyncClient) -> None:
    assert len((await both.post("/", json={"inputs": ["a", "man"]})).json()) == 2


async def test_the_page_is_no_part_of_the_api(both: httpx.AsyncClient) -> None:
    paths = (await both.get("/openapi.json")).json()["paths"]
    assert "get" not in paths["/"]
    assert not [path for path in paths if path.startswith("/playground")]


def test_the_page_names_only_files_that_are_there() -> None:
    page = text("index.html")
    named = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    imported = [name for file in NAMES if file.endswith(".js") for name in re.findall(r'from "\./([^"]+)"', text(file))]
    assert {name.removeprefix("playground/") for name in named} | {"index.html"} == set(NAMES)  # modules beforehand
    assert set(imported) <= set(NAMES)
    assert all(name.startswith("playground/") for name in named)  # relative: the service may be under a path


def test_no_script_and_no_style_is_inline() -> None:
    page = text("index.html")
    assert re.findall(r"<script[^>]*>[^<]|<style|\sstyle=|\son\w+=", page) == []


def test_no_file_makes_markup_of_text_or_names_another_place() -> None:
    for name in NAMES:
        if name.endswith((".js", ".html", ".css")):
            found = re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|localStorage|\beval\b", text(name)
            )
            places = set(re.findall(r"https?://[^\s\"'`)]+", text(name))) - {"http://www.w3.org/2000/svg"}
            assert (name, found, places) == (name, [], set())
