// Labels: what the model's heads answer to each text.

import { make, quote, scroller } from "./dom.js";
import { clip, lines, plural } from "./texts.js";

const LIMIT = 500;
const SHOWN = 5; // labels of one text

export async function labels(form, model, ask, info) {
  const texts = lines(form.elements["labels-lines"], LIMIT, "labels");
  const heads = Object.keys(info.heads);
  const found = await ask("predict", { inputs: texts.map((text) => [text]), head: heads, model });
  const tables = heads.map((name) => scroller(`Labels by ${name}`, table(name, texts, found[name])));
  return { view: tables, said: `${plural(texts.length, "text")}, ${plural(heads.length, "head")}.` };
}

function table(name, texts, answers) {
  const names = ["Text", name].map((title) => make("th", { scope: "col" }, title));
  return make(
    "table",
    { class: "hits" },
    make("thead", {}, make("tr", {}, ...names)),
    make("tbody", {}, ...texts.map((text, i) => row(text, answers[i]))),
  );
}

function row(text, answer) {
  const items = answer.slice(0, SHOWN).map(({ label, score }) => {
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", score.toFixed(3));
    return make("li", {}, quote(clip(label, 60)), ` ${score.toFixed(2)}`, bar);
  });
  const shown = make("ul", { class: "labels" }, ...items);
  return make("tr", {}, make("th", { scope: "row" }, quote(clip(text, 1000))), make("td", {}, shown));
}
