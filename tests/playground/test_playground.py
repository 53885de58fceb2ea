"""The playground in Chromium, before a real server: what it shows, how it is worked, and what it never does."""

import base64
import csv
import io
import re
from decimal import ROUND_HALF_UP, Decimal
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx
import numpy as np
import pytest
from patience import PATIENCE
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, Route, expect
from tiny_bundle import MAX_TOKENS
from visitor import KEY, Visitor

pytestmark = pytest.mark.browser

CONTRAST, EDGES, STOPS, BOXES = (
    (Path(__file__).parent / f"{name}.js").read_text(encoding="utf-8")
    for name in ("contrast", "edges", "stops", "boxes")
)
Scheme: TypeAlias = Literal["light", "dark"]

TOOLS = ("compare", "search", "map", "tokens", "labels")
TEXTS = ["a man plays the guitar", "the man plays", "two dogs run", "run dogs two"]
MARKUP = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"
WITHOUT_NOTES = """(line) => {
  const copy = line.cloneNode(true);
  copy.querySelectorAll("rt").forEach((note) => note.remove());
  return copy.textContent;
}"""
TRICKY = [
    MARKUP,
    "שלום עולם",
    "مرحبا",
    "👩‍👩‍👧‍👦 🎸",
    "word " * 3000,
    "x" * 5000,
    '"quoted", and, commas',
    "&amp; \\ ' `${1}`",
]


def matrix(service: httpx.Client, texts: list[str], model: str = "alpha") -> list[list[float]]:
    answer = service.post(
        "/similarity", json={"inputs": {"source_sentences": texts, "sentences": texts}, "model": model}
    )
    rows: list[list[float]] = answer.raise_for_status().json()
    return rows


def written(value: float) -> str:
    digits = f"{abs(value):.2f}"
    return f"−{digits}" if value < 0 and float(digits) else digits


def cells(visitor: Visitor, figure: int = 0) -> list[list[str]]:
    rows = visitor.result("compare").locator("figure").nth(figure).locator("tbody tr").all()
    return [row.locator("td").all_inner_texts() for row in rows]


# What is shown is what the service answers


def test_the_header_tells_the_model(visitor: Visitor, service: httpx.Client) -> None:
    info = service.get("/models/alpha/info").json()
    page = visitor.page
    expect(page.get_by_label("Model", exact=True)).to_have_value("alpha")
    expect(page.locator("#template")).to_have_text('This sentence of "" means [MASK].')
    expect(slot(visitor)).to_have_attribute("aria-placeholder", "your text")
    facts = page.get_by_role("list", name="What the model is")
    expect(facts).to_contain_text(f"dimensions {info['dimension']}")
    expect(facts).to_contain_text(f"limit {info['max_input_length']} tokens")
    expect(facts).to_contain_text(f"template {info['template']['template_tokens']} tokens")
    expect(facts).to_contain_text(info["provider"])


def slot(visitor: Visitor) -> Locator:
    """The place of the text in the template."""
    return visitor.page.get_by_role("textbox", name="Your text, in the template")


def words(visitor: Visitor) -> list[str]:
    return visitor.page.locator(".sequence .token.text .word").all_inner_texts()


def test_a_text_is_written_into_the_template(visitor: Visitor) -> None:
    page = visitor.page
    slot(visitor).click()
    page.keyboard.type("a man plays")
    expect(page.locator("#template")).to_have_text('This sentence of "a man plays" means [MASK].')
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Tokens")).to_have_attribute("aria-selected", "true")
    expect(visitor.result("tokens").locator(".count")).to_be_visible()
    assert words(visitor) == ["a", "man", "plays"]
    expect(page.locator("#tokens-text")).to_have_value("a man plays")
    page.keyboard.type(" the guitar")
    page.keyboard.press("Enter")
    expect(page.locator(".sequence .token.text")).to_have_count(5)
    page.get_by_label("Model", exact=True).select_option("beta")
    visitor.settle("tokens")
    expect(slot(visitor)).to_have_text("a man plays the guitar")
    page.locator("#tokens-text").fill("two dogs")
    expect(slot(visitor)).to_have_text("two dogs")
    slot(visitor).fill("")
    assert slot(visitor).evaluate("(slot) => getComputedStyle(slot, '::before').content") == '"your text"'
    page.keyboard.press("Enter")
    expect(page.locator(".sequence .token.text")).to_have_count(0)


def test_what_is_written_into_the_template_is_text(visitor: Visitor) -> None:
    slot(visitor).fill(MARKUP)
    visitor.page.keyboard.press("Enter")
    expect(visitor.page.locator("#tokens-text")).to_have_value(MARKUP)
    expect(slot(visitor)).to_have_text(MARKUP)
    expect(visitor.page).to_have_title("Cloze playground")
    visitor.page.locator("#tokens-text").fill("[MASK]")
    expect(visitor.page.locator("#template .mask")).to_have_count(1)


def test_the_header_shows_the_time_that_the_service_took(visitor: Visitor) -> None:
    with visitor.page.expect_response("**/similarity") as caught:
        visitor.page.get_by_role("button", name="Compare").click()
    reported = dict(re.findall(r"(\w+);dur=([\d.]+)", caught.value.headers["server-timing"]))
    assert {"tokenize", "queue", "inference", "total"} <= set(reported)
    shown = visitor.page.locator("#timing")
    for stage in ("tokenize", "queue", "inference", "total"):
        value = Decimal(float(reported[stage]))
        tenths = value.quantize(Decimal("0.1"), ROUND_HALF_UP)  # as a browser: 2.25 gives 2.3, and 0.35 0.3
        expect(shown.locator(f".{stage} dd")).to_have_text(f"{tenths} ms" if value < 10 else re.compile(r"^\d+ ms$"))
    expect(shown.locator(".trip dd")).to_have_text(re.compile(r"^[\d.,]+ ms$"))


def test_compare_shows_every_cosine(visitor: Visitor, service: httpx.Client) -> None:
    visitor.run("compare", lines="\n".join(TEXTS))
    assert cells(visitor) == [[written(value) for value in row] for row in matrix(service, TEXTS)]
    table = visitor.page.get_by_role("table", name="Cosine by alpha")
    assert table.get_by_role("rowheader").all_inner_texts() == [f"{i + 1} {text}" for i, text in enumerate(TEXTS)]
    assert table.get_by_role("columnheader").count() == len(TEXTS)


def test_a_cell_under_the_pointer_is_read_in_words(visitor: Visitor, service: httpx.Client) -> None:
    visitor.run("compare", lines="\n".join(TEXTS))
    visitor.result("compare").locator("tbody tr").nth(0).locator("td").nth(2).hover()
    readout = visitor.result("compare").locator(".readout")
    expect(readout).to_contain_text(written(matrix(service, TEXTS)[0][2]))
    expect(readout).to_contain_text(TEXTS[0])
    expect(readout).to_contain_text(TEXTS[2])


def signed(value: float) -> str:
    digits = f"{abs(value):.2f}"
    return digits if float(digits) == 0 else f"{'−' if value < 0 else '+'}{digits}"


def test_a_click_on_a_cell_colours_the_words_of_its_pair(visitor: Visitor, service: httpx.Client) -> None:
    texts = ["a man, who plays 🎸 the guitar", "run", *TEXTS]
    visitor.run("compare", lines="\n".join(texts))
    visitor.result("compare").locator("tbody tr").nth(0).locator("td").nth(1).click()
    shown = visitor.result("compare").locator(".explained")
    answer = service.post("/explain", json={"inputs": texts[:2], "model": "alpha"}).raise_for_status().json()
    expect(shown.locator("figcaption")).to_contain_text(f"Cosine {written(answer['cosine'])}")
    words = [word for each in answer["texts"] for word in each]
    assert shown.locator("mark").all_inner_texts() == [word["word"] for word in words]
    notes = ["only word" if word["change"] is None else signed(word["change"]) for word in words]
    assert shown.locator("rt").all_inner_texts() == notes
    plain = (
        "(p) => { p = p.cloneNode(true); p.querySelectorAll('rt').forEach((rt) => rt.remove()); return p.textContent }"
    )
    assert [line.evaluate(plain) for line in shown.locator("p[dir]").all()] == texts[:2]
    colours = {word.evaluate("(word) => word.style.backgroundColor") for word in shown.locator("mark").all()}
    assert len(colours) > 2


def test_the_keyboard_chooses_a_pair_to_explain(visitor: Visitor, service: httpx.Client) -> None:
    visitor.run("compare", lines="\n".join(TEXTS))
    visitor.page.get_by_label("First text").select_option("3")
    visitor.page.get_by_label("Second text").select_option("4")
    visitor.page.get_by_role("button", name="Show the words").press("Enter")
    answer = service.post("/explain", json={"inputs": TEXTS[2:4], "model": "alpha"}).json()
    found = visitor.result("compare").locator(".explained mark")
    expect(found).to_have_text([word["word"] for each in answer["texts"] for word in each])


def test_a_pair_that_is_too_long_to_explain_says_so(visitor: Visitor) -> None:
    visitor.refusals.add(422)
    visitor.run("compare", lines="\n".join(["word " * 300, "a man"]))
    visitor.page.get_by_role("button", name="Show the words").click()
    expect(visitor.result("compare").locator(".explained")).to_contain_text("at most 256 are explained: shorten them")


def test_cosines_are_shown_as_what_they_mean_where_the_model_says_it(visitor: Visitor, service: httpx.Client) -> None:
    visitor.page.get_by_label("Show what the cosines mean").check()
    visitor.run("compare", lines="\n".join(TEXTS))
    assert visitor.page.get_by_role("table", name="Score, 0 to 5, by alpha").count() == 1
    assert cells(visitor) == [[written(2.5 + 2.5 * value) for value in row] for row in matrix(service, TEXTS)]
    visitor.page.get_by_label("Model", exact=True).select_option("beta")
    expect(visitor.page.get_by_role("table", name="Cosine by beta")).to_be_visible()
    expect(visitor.page.get_by_label("Show what the cosines mean")).to_be_hidden()


def test_labels_are_those_of_the_service(visitor: Visitor, service: httpx.Client) -> None:
    visitor.turn_to("labels")
    visitor.run("labels", lines="\n".join(TEXTS))
    answer = service.post("/predict", json={"inputs": [[text] for text in TEXTS], "model": "alpha"}).json()
    rows = visitor.result("labels").locator("tbody tr").all()
    for row, labels in zip(rows, answer, strict=True):
        assert row.locator("li").all_inner_texts() == [f"{each['label']} {each['score']:.2f}" for each in labels]


def test_the_matrix_is_copied_as_csv(visitor: Visitor, service: httpx.Client) -> None:
    visitor.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    texts = [*TEXTS, 'commas, and "quotes"']
    visitor.run("compare", lines="\n".join(texts))
    visitor.page.get_by_role("button", name="Copy as CSV").click()
    expect(visitor.page.get_by_role("status")).to_have_text("Copied")
    copied = visitor.page.evaluate("() => navigator.clipboard.readText()")
    head, *rows = csv.reader(copied.splitlines())
    assert head == ["", *texts]
    assert [row[0] for row in rows] == texts
    np.testing.assert_array_equal([[float(value) for value in row[1:]] for row in rows], matrix(service, texts))


def test_a_result_that_was_replaced_is_let_go(visitor: Visitor) -> None:
    browser = visitor.page.context.new_cdp_session(visitor.page)
    counts = []
    for _ in range(6):
        visitor.run("compare", lines="\n".join(TEXTS * 3))
        browser.send("HeapProfiler.collectGarbage")
        counts.append(browser.send("Memory.getDOMCounters")["nodes"])
    assert counts[-1] < counts[1] + 100  # a result has more than a thousand


def test_two_models_stand_side_by_side(visitor: Visitor, service: httpx.Client) -> None:
    visitor.page.get_by_label("Compare with the model").select_option("beta")
    visitor.run("compare", lines="\n".join(TEXTS))
    expect(visitor.result("compare").locator("figcaption")).to_have_text(
        ["Cosine by alpha", "Cosine by beta", "Difference: beta − alpha"]
    )
    alpha, beta = matrix(service, TEXTS), matrix(service, TEXTS, "beta")
    assert alpha != beta
    assert cells(visitor, 0) == [[written(value) for value in row] for row in alpha]
    assert cells(visitor, 1) == [[written(value) for value in row] for row in beta]
    cursors = [
        visitor.result("compare")
        .locator("figure")
        .nth(number)
        .locator("td[data-row]")
        .first.evaluate("cell => getComputedStyle(cell).cursor")
        for number in range(3)
    ]
    assert cursors == ["pointer", "pointer", "auto"]  # a difference has no words
    shown = [[float(cell.replace("−", "-")) for cell in row] for row in cells(visitor, 2)]
    np.testing.assert_allclose(shown, np.array(beta) - np.array(alpha), atol=0.006)


def test_models_whose_numbers_mean_something_else_are_not_put_side_by_side(visitor: Visitor) -> None:
    visitor.page.get_by_label("Show what the cosines mean").check()
    visitor.page.get_by_label("Compare with the model").select_option("beta")
    visitor.page.get_by_role("button", name="Compare").click()
    expect(visitor.alert()).to_contain_text("beta is not calibrated on the same scale")
    expect(visitor.result("compare")).to_be_empty()


def test_a_model_that_does_not_answer_is_not_chosen(visitor: Visitor) -> None:
    visitor.refusals.add(503)
    error = '{"error": "the model is being loaded", "error_type": "Unhealthy"}'
    visitor.page.route(
        "**/models/beta/info", lambda route: route.fulfill(status=503, body=error, headers={"retry-after": "7"})
    )
    visitor.page.get_by_label("Model", exact=True).select_option("beta")
    expect(visitor.alert()).to_have_text("the model is being loaded. Try again in 7 s.")
    expect(visitor.page.get_by_label("Model", exact=True)).to_have_value("alpha")
    expect(visitor.page.get_by_role("table", name="Cosine by alpha")).to_be_visible()


def test_a_change_of_model_changes_what_is_shown(visitor: Visitor, service: httpx.Client) -> None:
    visitor.run("compare", lines="\n".join(TEXTS))
    visitor.page.get_by_label("Model", exact=True).select_option("beta")
    expect(visitor.page.get_by_role("table", name="Cosine by beta")).to_be_visible()
    assert cells(visitor) == [[written(value) for value in row] for row in matrix(service, TEXTS, "beta")]


def test_search_ranks_as_the_service_does(visitor: Visitor, service: httpx.Client) -> None:
    texts = [
        f"the {word} plays a guitar"
        for word in ("man", "dog", "two", "run", "of", "this", "a", "b", "c", "d", "e", "f")
    ]
    visitor.turn_to("search")
    hits = service.post("/search", json={"query": "dogs run", "texts": texts, "model": "alpha"}).json()
    for top, count in (("10", 10), ("all", len(texts))):
        visitor.page.get_by_label("Show the best").select_option(top)
        visitor.run("search", query="dogs run", lines="\n".join(texts))
        rows = visitor.result("search").locator("tbody tr")
        expect(rows).to_have_count(count)
        assert rows.get_by_role("rowheader").all_inner_texts() == [texts[hit["index"]] for hit in hits[:count]]
        scores = [float(text.replace("−", "-")) for text in rows.locator(".score").all_inner_texts()]
        np.testing.assert_allclose(scores, [hit["score"] for hit in hits[:count]], atol=6e-4)


def test_the_map_is_the_principal_plane(visitor: Visitor, service: httpx.Client) -> None:
    """Against numpy's decomposition: the table's coordinates, the shares said, and the points' places."""
    texts = [*TEXTS, "this sentence of a guitar", "man of the two", "guitar guitar guitar"]
    visitor.turn_to("map")
    visitor.run("map", lines="\n".join(texts))
    rows = service.post("/embed", json={"inputs": texts, "encoding_format": "base64", "model": "alpha"}).json()
    vectors = np.array([np.frombuffer(base64.b64decode(row), "<f4") for row in rows], dtype=np.float64)
    left, sizes, _ = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    plane = left[:, :2] * sizes[:2]
    plane *= np.sign(plane[np.abs(plane).argmax(0), [0, 1]])
    visitor.page.get_by_text("The points as a table").click()
    table = visitor.result("map").get_by_role("table").get_by_role("row").all()[1:]
    shown = [[float(cell.replace("−", "-")) for cell in row.get_by_role("cell").all_inner_texts()] for row in table]
    np.testing.assert_allclose(np.array(shown)[:, 1:], plane, atol=1.5e-3)
    shares = sizes**2 / (sizes**2).sum()
    expect(visitor.result("map")).to_contain_text(f"hold {round(100 * (shares[0] + shares[1]))} % of their variance")
    dots = visitor.result("map").get_by_role("option")
    places = np.array([[float(dot.get_attribute(axis) or "nan") for axis in ("cx", "cy")] for dot in dots.all()])
    scale = np.ptp(places[:, 0]) / np.ptp(plane[:, 0])
    np.testing.assert_allclose(np.ptp(places[:, 1]) / np.ptp(plane[:, 1]), scale, rtol=0.01)
    np.testing.assert_array_equal(np.argsort(places[:, 0]), np.argsort(plane[:, 0]))
    np.testing.assert_array_equal(np.argsort(-places[:, 1]), np.argsort(plane[:, 1]))


@pytest.mark.parametrize(("direction", "side"), [("right", "end"), ("left", "start")])
def test_tokens_show_the_template_and_the_cut(
    visitor: Visitor, service: httpx.Client, direction: str, side: str
) -> None:
    text = "two dogs run " * 12
    visitor.turn_to("tokens")
    visitor.page.get_by_label(f"({direction})").check()
    visitor.run("tokens", text=text)
    body = {"inputs": text, "truncation_direction": direction, "model": "alpha"}
    [tokens] = service.post("/tokenize", json=body).json()
    chips = visitor.page.get_by_role("list", name="The tokens in their order").get_by_role("listitem")
    assert chips.locator(".word").all_inner_texts() == [token["text"] for token in tokens]
    cut = [i for i, token in enumerate(tokens) if token["cut"]]
    assert cut
    assert [i for i, chip in enumerate(chips.all()) if chip.locator("s").count()] == cut
    assert "line-through" in chips.nth(cut[0]).locator("s").evaluate(
        "(chip) => getComputedStyle(chip).textDecorationLine"
    )
    assert [i for i, chip in enumerate(chips.all()) if ", mask" in (chip.text_content() or "")] == [
        i for i, token in enumerate(tokens) if token["text"] == "[MASK]"
    ]
    summary = visitor.result("tokens").locator(".count")
    expect(summary).to_contain_text(f"{MAX_TOKENS} of {MAX_TOKENS} tokens used")
    expect(summary).to_contain_text(f"{len(cut)} tokens of the text are cut at its {side} ({direction}).")


def test_kinds_of_token_differ_by_more_than_colour(visitor: Visitor) -> None:
    visitor.turn_to("tokens")
    visitor.run("tokens", text="two dogs run " * 12)
    looks = set()
    for kind in ("text", "template", "special", "mask", "cut"):
        look = (
            "(chip) => { const s = getComputedStyle(chip); return s.borderTopStyle + s.borderTopWidth + s.fontWeight }"
        )
        looks.add(visitor.page.locator(f".sequence .token.{kind}").first.evaluate(look))
    assert len(looks) == 5


def test_a_mask_in_the_text_is_text(visitor: Visitor) -> None:
    visitor.turn_to("tokens")
    visitor.run("tokens", text="[MASK]")
    expect(visitor.page.locator(".sequence .token.mask")).to_have_count(1)
    expect(visitor.page.locator(".sequence .token.text .word")).to_have_text(["[", "m", "##a", "##s", "##k", "]"])


@pytest.mark.long
def test_a_very_long_text_shows_both_ends_of_what_is_cut(visitor: Visitor, service: httpx.Client) -> None:
    cut = 30_000 - service.get("/info").json()["template"]["text_tokens"]
    visitor.turn_to("tokens")
    visitor.run("tokens", text="two dogs run " * 10_000)
    expect(visitor.result("tokens").locator(".count")).to_contain_text(f"{cut:,} tokens of the text are cut")
    shown = visitor.page.locator(".sequence .token.cut").count()
    assert 50 < shown < 100
    expect(visitor.page.locator(".sequence .more")).to_have_text(f"… {cut - shown:,} more are cut …")


# Odd texts and limits


@pytest.mark.long
@pytest.mark.parametrize("tool", TOOLS)
def test_any_text_is_shown_as_it_was_typed(visitor: Visitor, tool: str) -> None:
    visitor.turn_to(tool)
    if tool == "tokens":
        visitor.run(tool, text="\n".join(TRICKY))
    else:
        visitor.run(tool, lines="\n".join(TRICKY))
        shown = visitor.result(tool).get_by_role("rowheader", include_hidden=True).all_text_contents()
        assert len(shown) == len(TRICKY)
        assert any(MARKUP in text for text in shown)
    expect(visitor.alert()).to_be_empty()
    expect(visitor.page).to_have_title("Cloze playground")
    assert visitor.page.locator("main img, main b:not(.readout b)").count() == 0
    assert visitor.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.long
@pytest.mark.parametrize("tool", ["compare", "search", "map"])
def test_a_missing_text_is_reported_without_a_request(visitor: Visitor, tool: str) -> None:
    visitor.turn_to(tool)
    asked = len(visitor.requests)
    visitor.page.locator(f"#{tool}-lines").fill("  \n\n \t ")
    visitor.page.locator(f"#{tool} button.primary").click()
    expect(visitor.alert()).to_contain_text("There is no text yet")
    assert len(visitor.requests) == asked


def test_a_missing_text_has_the_tokens_of_the_template(visitor: Visitor) -> None:
    visitor.turn_to("tokens")
    visitor.run("tokens", text="")
    expect(visitor.page.locator(".sequence .token.mask")).to_have_count(1)
    expect(visitor.page.locator(".sequence .token.text")).to_have_count(0)


@pytest.mark.long
@pytest.mark.parametrize("tool", ["compare", "search", "map"])
def test_one_line_is_enough(visitor: Visitor, tool: str) -> None:
    visitor.turn_to(tool)
    visitor.run(tool, lines="a man")
    expect(visitor.result(tool).get_by_role("rowheader", include_hidden=True)).to_have_count(1)
    expect(visitor.alert()).to_be_empty()


@pytest.mark.long
@pytest.mark.parametrize(("tool", "limit"), [("compare", 64), ("search", 2000), ("map", 2000)])
def test_the_limit_works_and_one_more_is_said(visitor: Visitor, tool: str, limit: int) -> None:
    visitor.turn_to(tool)
    lines = [f"two dogs run {i}" for i in range(limit + 1)]
    area = visitor.page.locator(f"#{tool}-lines")
    visitor.put(area, "\n".join(lines))
    visitor.page.locator(f"#{tool} button.primary").click()
    expect(visitor.alert()).to_contain_text(f"{limit + 1:,} lines are too many")
    expect(visitor.alert()).to_contain_text(f"it takes {limit:,}. Remove 1.")
    if tool == "search":
        visitor.page.get_by_label("Show the best").select_option("all")
    visitor.run(tool, lines="\n".join(lines[:limit]))
    expect(visitor.result(tool).get_by_role("rowheader", include_hidden=True)).to_have_count(limit)
    expect(visitor.alert()).to_be_empty()


@pytest.mark.long
def test_alike_lines_have_a_map(visitor: Visitor) -> None:
    visitor.turn_to("map")
    visitor.run("map", lines="a man\na man\na man")
    expect(visitor.result("map").get_by_role("option")).to_have_count(3)
    expect(visitor.result("map")).to_contain_text("hold 0 %")


def test_an_error_of_the_service_is_shown_in_its_words(visitor: Visitor, service: httpx.Client) -> None:
    visitor.refusals.add(424)
    visitor.turn_to("search")
    visitor.run("search", query="poison", lines="a man")
    said = service.post("/search", json={"query": "poison", "texts": ["a man"]})
    assert said.status_code == 424
    expect(visitor.alert()).to_have_text(said.json()["error"])
    expect(visitor.result("search")).to_be_empty()
    visitor.run("search", query="man", lines="a man")
    expect(visitor.alert()).to_be_empty()


def test_an_error_belongs_to_its_tab(visitor: Visitor) -> None:
    visitor.refusals.add(424)
    visitor.turn_to("search")
    visitor.run("search", query="poison", lines="a man")
    said = visitor.alert().inner_text()
    visitor.page.get_by_role("tab", name="Compare").click()
    expect(visitor.alert()).to_be_empty()
    visitor.run("compare", lines="a man\nthe man")
    visitor.page.get_by_role("tab", name="Search").click()
    expect(visitor.alert()).to_have_text(said)
    expect(visitor.result("search")).to_be_empty()


def test_what_comes_late_for_a_tab_that_is_left_is_not_said_in_another(visitor: Visitor) -> None:
    visitor.refusals.add(500)
    held: list[Route] = []
    visitor.page.route("**/similarity", lambda route: held.append(route))
    visitor.page.get_by_role("button", name="Compare").click()
    visitor.wait_until(lambda: held)
    visitor.turn_to("search")
    said = visitor.page.get_by_role("status").inner_text()
    held[0].fulfill(status=500, body='{"error": "late"}')
    expect(visitor.page.locator("#compare .result")).not_to_have_attribute("aria-busy", "true")
    expect(visitor.alert()).to_be_empty()
    expect(visitor.page.get_by_role("status")).to_have_text(said)
    visitor.page.get_by_role("tab", name="Compare").click()
    expect(visitor.alert()).to_have_text("late")


def test_an_answer_that_is_not_the_services_is_said(visitor: Visitor) -> None:
    visitor.page.route("**/similarity", lambda route: route.fulfill(content_type="text/html", body="<h1>Login</h1>"))
    visitor.page.get_by_role("button", name="Compare").click()
    expect(visitor.alert()).to_contain_text("it is not JSON")
    visitor.settle("compare")


def test_a_service_that_is_gone_is_said(visitor: Visitor) -> None:
    visitor.page.route("**/similarity", lambda route: route.abort("connectionrefused"))
    visitor.page.get_by_role("button", name="Compare").click()
    expect(visitor.alert()).to_contain_text("The service cannot be reached")
    complaint = "Failed to load resource: net::ERR_CONNECTION_REFUSED"
    visitor.wait_until(lambda: complaint in visitor.complaints)
    visitor.complaints.remove(complaint)


def test_a_result_is_busy_until_the_answer_is_there(visitor: Visitor) -> None:
    held: list[Route] = []
    visitor.page.route("**/similarity", lambda route: held.append(route))
    with visitor.page.expect_request("**/similarity"):
        visitor.page.get_by_role("button", name="Compare").click()
    expect(visitor.result("compare")).to_have_attribute("aria-busy", "true")
    visitor.wait_until(lambda: held)
    held[0].continue_()
    visitor.settle("compare")
    expect(visitor.page.get_by_role("status")).to_have_text("6 texts compared.")


def test_the_last_run_wins(visitor: Visitor) -> None:
    """The question before is given up: no answer of it can come late, and nothing is said of it."""
    held: list[Route] = []
    visitor.page.route("**/similarity", lambda route: held.append(route))
    lines, button = visitor.page.locator("#compare-lines"), visitor.page.get_by_role("button", name="Compare")
    lines.fill("a man\nthe man")
    with visitor.page.expect_request("**/similarity") as first:
        button.click()
    lines.fill("two\ndogs\nrun")
    with visitor.page.expect_event("requestfailed") as given_up, visitor.page.expect_request("**/similarity"):
        button.click()
    assert given_up.value == first.value
    visitor.wait_until(lambda: len(held) == 2)
    held[1].continue_()
    visitor.settle("compare")
    expect(visitor.page.get_by_role("status")).to_have_text("3 texts compared.")
    expect(visitor.result("compare").locator("tbody tr")).to_have_count(3)
    expect(visitor.alert()).to_be_empty()


# The key


def test_a_key_is_asked_for_and_kept_in_memory(locked_out: Visitor) -> None:
    page = locked_out.page
    field = page.get_by_label("API key")
    expect(field).to_be_focused()
    expect(locked_out.alert()).not_to_be_empty()
    field.fill("wrong")
    page.keyboard.press("Enter")
    expect(field).to_have_value("")
    expect(field).to_be_focused()
    expect(locked_out.alert()).not_to_be_empty()
    field.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("table", name="Cosine by alpha")).to_be_visible()
    expect(field).to_be_hidden()
    expect(locked_out.alert()).to_be_empty()
    assert page.evaluate("() => [sessionStorage.length, localStorage.length, document.cookie]") == [0, 0, ""]
    page.reload()
    expect(field).to_be_visible()


def test_a_key_that_no_header_can_carry_is_not_taken(locked_out: Visitor) -> None:
    field = locked_out.page.get_by_label("API key")
    expect(field).to_be_focused()
    asked = len(locked_out.requests)
    field.fill(f"{KEY}\u200b")
    locked_out.page.keyboard.press("Enter")
    expect(field).to_have_value(f"{KEY}\u200b")
    assert field.evaluate("field => field.validity.patternMismatch")
    field.fill(f" {KEY} ")
    assert len(locked_out.requests) == asked
    locked_out.page.keyboard.press("Enter")
    expect(locked_out.page.get_by_role("table", name="Cosine by alpha")).to_be_visible()


def test_a_key_is_kept_for_the_tab_where_that_is_asked_for(locked_out: Visitor) -> None:
    page = locked_out.page
    page.get_by_label("Keep it until this tab is closed").check()
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    table = page.get_by_role("table", name="Cosine by alpha")
    expect(table).to_be_visible()
    page.reload()
    expect(table).to_be_visible()
    assert page.evaluate("() => Object.values(sessionStorage)") == [KEY]
    page.get_by_role("button", name="Forget it").click()
    assert page.evaluate("() => sessionStorage.length") == 0
    expect(page.get_by_label("API key")).to_be_focused()


def test_another_key_keeps_the_model(locked_out: Visitor) -> None:
    page = locked_out.page
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("table", name="Cosine by alpha")).to_be_visible()
    page.get_by_label("Model", exact=True).select_option("beta")
    expect(page.get_by_role("table", name="Cosine by beta")).to_be_visible()
    page.get_by_role("button", name="Forget it").click()
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("table", name="Cosine by beta")).to_be_visible()
    expect(page.get_by_label("Model", exact=True)).to_have_value("beta")


def test_no_text_is_stored(visitor: Visitor) -> None:
    for tool in TOOLS:
        visitor.turn_to(tool)
        visitor.run(tool, **{"text" if tool == "tokens" else "lines": "the guitar"})
    stored = "() => [sessionStorage.length, localStorage.length, document.cookie, location.search + location.hash]"
    assert visitor.page.evaluate(stored) == [0, 0, "", ""]
    assert visitor.page.context.cookies() == []
    visitor.page.reload()
    expect(visitor.page.locator("#compare-lines")).not_to_have_value("the guitar")


# Keyboard and screen reader


def test_the_keyboard_alone_is_enough(visitor: Visitor) -> None:
    page, keys = visitor.page, visitor.page.keyboard
    keys.press("Tab")
    expect(page.get_by_text("Skip to the tools")).to_be_focused()
    keys.press("Enter")
    keys.press("Tab")
    expect(page.get_by_role("tab", name="Compare")).to_be_focused()
    keys.press("Tab")
    expect(page.get_by_label("Texts, one per line").first).to_be_focused()
    keys.press("Control+a")
    keys.type("two dogs")
    keys.press("Enter")
    keys.type("a man")
    keys.press("Control+Enter")
    expect(page.get_by_role("status")).to_have_text("2 texts compared.")
    keys.press("Shift+Tab")
    keys.press("ArrowRight")
    expect(page.get_by_role("tab", name="Search")).to_be_focused()
    keys.press("Tab")
    expect(page.get_by_label("Query")).to_be_focused()
    keys.press("Control+a")
    keys.type("dogs run")
    keys.press("Enter")
    expect(page.get_by_role("status")).to_have_text("8 texts of 8, best first.")


@pytest.mark.long
def test_tabs_are_a_tablist(visitor: Visitor) -> None:
    page = visitor.page
    page.get_by_role("tab", name="Compare").focus()
    for key, name in [
        ("ArrowRight", "Search"),
        ("End", "Labels"),
        ("ArrowRight", "Compare"),
        ("ArrowLeft", "Labels"),
        ("Home", "Compare"),
    ]:
        page.keyboard.press(key)
        tab = page.get_by_role("tab", name=name)
        expect(tab).to_be_focused()
        expect(tab).to_have_attribute("aria-selected", "true")
        expect(page.get_by_role("tab", selected=True)).to_have_count(1)
        expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
        expect(page.get_by_role("tabpanel")).to_have_count(1)
        assert page.locator("[role=tab][tabindex='0'], [role=tab]:not([tabindex])").all_inner_texts() == [name]


@pytest.mark.long
def test_every_point_can_be_reached_and_read(visitor: Visitor) -> None:
    page = visitor.page
    visitor.turn_to("map")
    visitor.run("map", lines="\n".join(TEXTS))
    points = visitor.result("map").get_by_role("option")
    expect(points).to_have_count(len(TEXTS))  # drawn a frame after the answer
    page.locator("#map button.primary").focus()
    page.keyboard.press("Tab")
    for onward, back in (("ArrowRight", "ArrowLeft"), ("ArrowDown", "ArrowUp")):
        seen = set()
        for _ in TEXTS:
            page.keyboard.press(back)
        for _ in TEXTS:
            focused = visitor.result("map").locator("circle:focus")
            label = focused.get_attribute("aria-label")
            expect(visitor.result("map").locator(".tip")).to_have_text(label or "no label")
            seen.add(label)
            page.keyboard.press(onward)
        assert seen == set(TEXTS)
    page.keyboard.press("Tab")
    assert visitor.result("map").locator("circle:focus").count() == 0  # one stop in the tab order
    points.first.hover()
    expect(visitor.result("map").locator(".tip")).to_be_visible()
    points.first.focus()
    page.keyboard.press("Escape")
    expect(visitor.result("map").locator(".tip")).to_be_hidden()


@pytest.mark.long
def test_what_a_screen_reader_meets(visitor: Visitor) -> None:
    visitor.run("compare", lines="a man\ntwo dogs")
    page = visitor.page
    expect(page.get_by_role("banner")).to_match_aria_snapshot("""
      - heading "Cloze playground" [level=1]
      - text: Model
      - combobox "Model"
    """)
    expect(page.get_by_role("main")).to_match_aria_snapshot("""
      - main:
        - tablist "Tools":
          - tab "Compare" [selected]
          - tab "Search"
          - tab "Map"
          - tab "Tokens"
          - tab "Labels"
        - alert
        - status: 2 texts compared.
        - tabpanel "Compare":
          - text: Texts, one per line
          - textbox "Texts, one per line": a man two dogs
          - combobox "Compare with the model"
          - checkbox "Show what the cosines mean"
          - button "Compare"
          - figure "Cosine by alpha":
            - region "Cosine by alpha, table":
              - table "Cosine by alpha":
                - rowgroup:
                  - 'row "1 : a man 2 : two dogs"':
                    - cell
                    - 'columnheader "1 : a man"'
                    - 'columnheader "2 : two dogs"'
                - rowgroup:
                  - row /1 a man/:
                    - rowheader "1 a man"
                    - cell "1.00"
                    - cell
                  - row /2 two dogs/:
                    - rowheader "2 two dogs"
                    - cell
                    - cell "1.00"
            - paragraph:
              - button "Copy as CSV"
            - combobox "First text"
            - combobox "Second text"
            - button "Show the words"
    """)
    expect(page.get_by_role("contentinfo")).to_be_visible()


@pytest.mark.long
def test_every_control_has_a_name(visitor: Visitor) -> None:
    for tool in TOOLS:
        visitor.turn_to(tool)
        for control in visitor.page.locator("button, input, select, textarea, [tabindex='0']").all():
            if control.is_visible():
                expect(control).to_have_accessible_name(re.compile(r"\w"))


@pytest.mark.long
@pytest.mark.parametrize("tool", TOOLS)
def test_the_keyboard_reaches_every_control_and_focus_is_seen(visitor: Visitor, tool: str) -> None:
    ring = "(element) => { const s = getComputedStyle(element); return [s.outlineStyle, s.outlineWidth] }"
    visitor.turn_to(tool)
    page = visitor.page
    if tool == "map":
        expect(visitor.result("map").get_by_role("option").first).to_be_visible()
    count = page.evaluate(STOPS)
    page.evaluate("() => { document.activeElement.blur(); getSelection().removeAllRanges(); scrollTo(0, 0) }")
    page.locator("h1").click()  # from the start of the page
    page.keyboard.press("Shift+Tab")
    reached, rings = [], []
    for _ in range(2 * count):
        focused = page.locator(":focus:not(body)")
        if focused.count():
            reached.append(focused.evaluate("(element) => window.stops.indexOf(element)"))
            rings.append(focused.evaluate(ring))
            expect(focused).to_be_in_viewport()
        elif reached:
            break
        page.keyboard.press("Tab")
    assert reached == list(range(count))  # in the order of the page, and no other
    assert rings == [["solid", "3px"]] * count


# Looks


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_stands_out(browser: Browser, url: str, scheme: str) -> None:
    """WCAG AA, on the colours that Chromium computed; cells of the heat map and tokens of each kind included."""
    context = browser.new_context(color_scheme="dark" if scheme == "dark" else "light")
    context.set_default_timeout(1000 * PATIENCE)
    visitor = Visitor(context.new_page(), url, refusals={424})
    visitor.open()
    seen = 0
    for tool in TOOLS:
        visitor.turn_to(tool)
        if tool == "compare":
            visitor.page.get_by_label("Compare with the model").select_option("beta")
            visitor.run("compare", lines="\n".join(TEXTS))
        if tool == "tokens":
            visitor.run("tokens", text="two dogs run " * 12)
        measured = visitor.page.evaluate(CONTRAST)
        seen += len(measured)
        assert [text for text in measured if text["ratio"] < text["least"]] == []
    visitor.turn_to("search")
    visitor.run("search", query="poison")
    measured = visitor.page.evaluate(CONTRAST)
    assert [text for text in measured if text["ratio"] < text["least"]] == []
    assert seen > 100
    paper = visitor.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 384) == (scheme == "dark")
    visitor.leave()
    context.close()


@pytest.mark.long
def test_the_heat_map_follows_the_scheme(visitor: Visitor) -> None:
    cell = visitor.result("compare").locator("td[data-row]").first
    light = cell.evaluate("(cell) => cell.style.backgroundColor")
    visitor.page.emulate_media(color_scheme="dark")
    expect(cell).not_to_have_css("background-color", light)
    assert [text for text in visitor.page.evaluate(CONTRAST) if text["ratio"] < text["least"]] == []


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_edge_of_a_control_and_the_focus_stand_out(visitor: Visitor, scheme: Scheme) -> None:
    """At 3:1, which WCAG AA asks of what tells a control from the page."""
    visitor.page.emulate_media(color_scheme=scheme)
    for tool in TOOLS:
        visitor.turn_to(tool)
        visitor.page.keyboard.press("Tab")
        measured = visitor.page.evaluate(EDGES)
        assert len(measured) >= 5
        assert [each for each in measured if each["ratio"] < 3] == []


def overlaps(boxes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What two boxes show that share more than a pixel in both directions."""
    return [
        (one["name"], other["name"])
        for one, other in combinations(boxes, 2)
        if min(one["right"], other["right"]) - max(one["left"], other["left"]) > 1
        and min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) > 1
    ]


@pytest.mark.long
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_of_the_page_has_the_colours_of_its_scheme_and_nothing_overlaps(
    visitor: Visitor, scheme: Scheme, width: int
) -> None:
    visitor.page.emulate_media(color_scheme=scheme)
    visitor.page.set_viewport_size({"width": width, "height": 812})
    slot(visitor).fill("a man plays the guitar, and two dogs run " * 2)
    visitor.page.locator("h1").click()
    for tool in TOOLS:
        visitor.turn_to(tool)
        assert visitor.page.evaluate("() => document.documentElement.scrollWidth") == width
        boxes = visitor.page.evaluate(BOXES)
        assert len(boxes) > 15
        assert [box for box in boxes if box["left"] < 0 or box["right"] > width] == []
        assert overlaps(boxes) == []
        picture = Image.open(io.BytesIO(visitor.page.screenshot(full_page=True))).convert("RGB")
        assert picture.width == width
        counts = {colour: count for count, colour in picture.getcolors(picture.width * picture.height) or []}
        paper, ink = (
            tuple(map(int, re.findall(r"\d+", visitor.page.evaluate(f"() => getComputedStyle(document.body).{name}"))))
            for name in ("backgroundColor", "color")
        )
        bright, dim = (paper, ink) if scheme == "light" else (ink, paper)
        assert sum(bright) > 600 > 200 > sum(dim)
        assert picture.getpixel((2, 2)) == picture.getpixel((width - 3, picture.height - 3)) == paper
        assert counts[paper] > picture.width * picture.height / 3
        assert counts[ink] > 100


@pytest.mark.long
@pytest.mark.parametrize("width", [320, 360])
def test_a_phone_never_scrolls_sideways(visitor: Visitor, width: int) -> None:
    visitor.page.set_viewport_size({"width": width, "height": 740})
    for tool in TOOLS:
        visitor.turn_to(tool)
        visitor.run(tool, **{"text" if tool == "tokens" else "lines": "\n".join([*TRICKY, *TEXTS])})
        assert visitor.page.evaluate("() => document.documentElement.scrollWidth") == width
        for control in visitor.page.locator("button, input, textarea, select").all():
            box = control.bounding_box()
            assert box is None or (box["x"] >= 0 and box["x"] + box["width"] <= width)
    visitor.turn_to("compare")
    region = visitor.result("compare").get_by_role("region")
    assert region.evaluate("(region) => region.scrollWidth > region.clientWidth")
    region.focus()
    expect(region).to_be_focused()
    for _ in range(1000):  # the browser can lose a key while it draws, so it is pressed as a user would, until it moves
        visitor.page.keyboard.press("ArrowRight")
        if region.evaluate("(region) => new Promise((done) => setTimeout(() => done(region.scrollLeft), 50))"):
            break
    else:
        pytest.fail("the region never scrolled")


@pytest.mark.long
def test_less_motion_is_none(visitor: Visitor) -> None:
    durations = """() => [...document.querySelectorAll("*")].map((element) => {
      const style = getComputedStyle(element);
      return style.transitionProperty === "none" ? "0s" : style.transitionDuration;
    })"""
    visitor.result("compare").evaluate("(result) => result.setAttribute('aria-busy', 'true')")
    assert set(visitor.page.evaluate(durations)) == {"0s", "0.2s"}
    visitor.page.emulate_media(reduced_motion="reduce")
    assert set(visitor.page.evaluate(durations)) == {"0s"}


# What the policy forbids


def test_no_other_script_runs_and_no_other_place_is_asked(visitor: Visitor) -> None:
    page: Page = visitor.page
    inline = """() => {
      const script = document.createElement("script");
      script.textContent = "window.ran = true";
      document.head.append(script);
      const image = document.createElement("div");
      image.innerHTML = '<img src="playground/none" onerror="window.ran = true">';
      document.body.append(image);
      return window.ran ?? false;
    }"""
    visitor.refusals.add(404)
    with page.expect_response("**/playground/none"):
        assert page.evaluate(inline) is False
    assert page.evaluate("() => fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => error.name)") == "TypeError"
    assert page.evaluate("() => window.ran ?? false") is False

    def blocked() -> list[str]:
        return [text for text in visitor.complaints if "Content Security Policy" in text]

    visitor.wait_until(lambda: len(blocked()) >= 3)
    visitor.complaints = [text for text in visitor.complaints if text not in blocked()]


def test_another_site_cannot_frame_it(page: Page, url: str) -> None:
    page.set_content(f'<iframe src="{url}/"></iframe>')
    frame = page.frame_locator("iframe")
    expect(frame.get_by_role("tablist")).to_have_count(0)
    assert any("frame-ancestors" in text for text in _complaints(page, url))


def _complaints(page: Page, url: str) -> list[str]:
    with page.expect_console_message(lambda message: message.type == "error") as caught:
        page.set_content(f'<iframe src="{url}/?again"></iframe>')
    return [caught.value.text]
