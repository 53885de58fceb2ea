// Compare: each text with each, by one model or by two.

import { pathOf } from "./api.js";
import { copyButton, make } from "./dom.js";
import { explainer } from "./explain.js";
import { diverging, heat, sequential } from "./heat.js";
import { Problem, csv, lines, plural } from "./texts.js";

const LIMIT = 64;

export async function compare(form, model, ask, info) {
  const texts = lines(form.elements["compare-lines"], LIMIT, "the heat map");
  const other = form.elements["compare-with"].value;
  const names = other ? [model, other] : [model];
  const meaning = form.elements.calibrated.checked ? info?.calibration : null;
  if (meaning && other) await checkAlike(meaning, other, ask);
  const inputs = { source_sentences: texts, sentences: texts };
  const bodies = names.map((name) => ({ inputs, model: name, ...(meaning && { calibrated: true }) }));
  const matrices = await Promise.all(bodies.map((body) => ask("similarity", body)));
  const figures = matrices.map((matrix, i) => cosines(measure(meaning), names[i], texts, matrix, ask));
  if (other) figures.push(difference(names, texts, matrices));
  const view = make("div", { class: other ? "matrices several" : "matrices" }, ...figures);
  return { view: [view], said: `${plural(texts.length, "text")} compared.` };
}

/** Two models' numbers stand beside each other only if they mean the same. */
async function checkAlike(meaning, other, ask) {
  const { calibration } = await ask(`${pathOf(other)}/info`);
  const alike = ["meaning", "lowest", "highest"].every((part) => calibration?.[part] === meaning[part]);
  if (!alike) throw new Problem(`${other} is not calibrated on the same scale: compare cosines, or choose another model.`);
}

function measure(meaning) {
  if (!meaning) return "Cosine";
  const { lowest, highest } = meaning;
  return meaning.meaning === "score" ? `Score, ${lowest} to ${highest},` : "Probability of the same meaning";
}

function cosines(measured, name, texts, matrix, ask) {
  const { view, choose } = explainer(texts, name, ask);
  const options = { controls: [copy(texts, matrix)], choose };
  const found = heat(name ? `${measured} by ${name}` : measured, texts, matrix, sequential(matrix), options);
  found.append(...view);
  return found;
}

function difference([first, second], texts, [before, after]) {
  const matrix = after.map((row, i) => row.map((value, j) => value - before[i][j]));
  const options = { signed: true, controls: [copy(texts, matrix)] };
  return heat(`Difference: ${second} − ${first}`, texts, matrix, diverging(matrix), options);
}

function copy(texts, matrix) {
  return copyButton("Copy as CSV", () => csv([["", ...texts], ...matrix.map((values, i) => [texts[i], ...values])]));
}
