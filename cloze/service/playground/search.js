// Search: the pasted texts, nearest to the query first.

import { copyButton, make, quote, scroller } from "./dom.js";
import { Problem, clip, csv, lines, plural } from "./texts.js";

const LIMIT = 2000;

export async function search(form, model, ask) {
  const query = form.elements["search-query"].value;
  if (!query.trim()) throw new Problem("There is no query yet: say what to look for.");
  const texts = lines(form.elements["search-lines"], LIMIT, "a search");
  const top = Number(form.elements["search-top"].value) || null;
  const hits = await ask("search", { query, texts, top_k: top, model });
  const rows = () => [
    ["rank", "score", "number", "text"],
    ...hits.map(({ index, score }, i) => [i + 1, score, index + 1, texts[index]]),
  ];
  const said = `${plural(hits.length, "text")} of ${texts.length.toLocaleString("en")}, best first.`;
  const note = make("p", { class: "note" }, said);
  return {
    view: [note, scroller("Results, best first", table(hits, texts)), copyButton("Copy as CSV", () => csv(rows()))],
    said,
  };
}

function table(hits, texts) {
  const names = ["Rank", "Score", "Text"].map((name) => make("th", { scope: "col" }, name));
  return make(
    "table",
    { class: "hits" },
    make("thead", {}, make("tr", {}, ...names)),
    make("tbody", {}, ...hits.map((hit, i) => row(hit, i, texts))),
  );
}

function row({ index, score }, i, texts) {
  const bar = make("span", { class: "bar", "aria-hidden": "true" });
  bar.style.setProperty("--share", Math.max(0, score).toFixed(3));
  return make(
    "tr",
    {},
    make("td", { class: "rank" }, String(i + 1)),
    make("td", { class: "score" }, score.toFixed(3).replace("-", "−"), bar),
    make("th", { scope: "row" }, quote(clip(texts[index], 1000))),
  );
}
