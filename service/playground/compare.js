// Compare: each text with each, by one model or by two.

import { copyButton, make } from "./dom.js";
import { diverging, heat, sequential } from "./heat.js";
import { csv, lines, plural } from "./texts.js";

const LIMIT = 64;

export async function compare(form, model, ask) {
  const texts = lines(form.elements["compare-lines"], LIMIT, "the heat map");
  const other = form.elements["compare-with"].value;
  const names = other ? [model, other] : [model];
  const inputs = { source_sentences: texts, sentences: texts };
  const matrices = await Promise.all(names.map((name) => ask("similarity", { inputs, model: name })));
  const figures = matrices.map((matrix, i) => cosines(names[i], texts, matrix));
  if (other) figures.push(difference(names, texts, matrices));
  const view = make("div", { class: other ? "matrices several" : "matrices" }, ...figures);
  return { view: [view], said: `${plural(texts.length, "text")} compared.` };
}

function cosines(name, texts, matrix) {
  return heat(name ? `Cosine by ${name}` : "Cosine", texts, matrix, sequential(matrix), {
    controls: [copy(texts, matrix)],
  });
}

function difference([first, second], texts, [before, after]) {
  const matrix = after.map((row, i) => row.map((value, j) => value - before[i][j]));
  const options = { signed: true, controls: [copy(texts, matrix)] };
  return heat(`Difference: ${second} − ${first}`, texts, matrix, diverging(matrix), options);
}

function copy(texts, matrix) {
  return copyButton("Copy as CSV", () => csv([["", ...texts], ...matrix.map((values, i) => [texts[i], ...values])]));
}
