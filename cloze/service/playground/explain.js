// Explain: the words of two texts, coloured by what each of them does to the cosine.

import { ServiceError } from "./api.js";
import { make } from "./dom.js";
import { colour, diverging, legend, write } from "./heat.js";

/** A form that chooses a pair of `texts`, and where its explanation is shown; `choose(i, j)` shows one. */
export function explainer(texts, model, ask) {
  const shown = make("div", { class: "explained", "aria-live": "polite" });
  const [first, second] = ["First text", "Second text"].map((name) => {
    const options = texts.map((_, i) => make("option", { value: i }, String(i + 1)));
    return make("select", { "aria-label": name }, ...options);
  });
  second.value = String(Math.min(1, texts.length - 1));
  const form = make(
    "form",
    { class: "why" },
    "Which words make ",
    first,
    " and ",
    second,
    " alike? ",
    make("button", { class: "plain" }, "Show the words"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    show(Number(first.value), Number(second.value));
  });

  let latest = 0;
  async function show(i, j) {
    const number = ++latest;
    [first.value, second.value] = [String(i), String(j)];
    let view;
    try {
      view = figure(await ask("explain", { inputs: [texts[i], texts[j]], model }), [texts[i], texts[j]]);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ServiceError)) throw error;
      view = make("p", { class: "alert" }, error.message);
    }
    if (number === latest) shown.replaceChildren(view);
  }

  return { view: [form, shown], choose: show };
}

function figure({ cosine, texts: explained }, texts) {
  const changes = explained.flat().map(({ change }) => change ?? 0);
  const scale = diverging([changes]);
  const marks = [];
  const lines = explained.map((words, i) => line(texts[i], words, marks));
  const found = make(
    "figure",
    { class: "words" },
    make("figcaption", {}, `Cosine ${write(cosine)}, and its change without each word`),
    ...lines,
    legend(scale, (value) => write(value, true)),
  );
  colour(found, marks, changes, scale);
  return found;
}

/** The text with each of its words marked; what is between them stays. */
function line(text, words, marks) {
  const signs = [...text]; // places count characters, not halves of them
  const parts = [];
  let at = 0;
  for (const { start, stop, change } of words) {
    const word = make("mark", {}, signs.slice(start, stop).join(""));
    marks.push(word);
    const said = change === null ? "only word" : write(change, true);
    parts.push(signs.slice(at, start).join(""), make("ruby", {}, word, make("rt", {}, said)));
    at = stop;
  }
  parts.push(signs.slice(at).join(""));
  return make("p", { dir: "auto" }, ...parts);
}
