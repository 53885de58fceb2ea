// A matrix as a table of numbers on coloured cells.

import { make, quote, scroller, unseen } from "./dom.js";
import { clip } from "./texts.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

// From low to high; in the dark the high end is the bright one.
const SEQUENTIAL = {
  light: ["#f6faee", "#c5e6c3", "#6cbfb8", "#2a86ad", "#1f4e8c"],
  dark: ["#1a242c", "#1d4a60", "#23808c", "#5fbf9f", "#e4f2ab"],
};
// From "the first is higher" over "alike" to "the second is higher".
const DIVERGING = {
  light: ["#6a4aa3", "#c9bfe3", "#f7f7f4", "#f3c998", "#b65a08"],
  dark: ["#b9a3ef", "#5d4a8d", "#20262b", "#83501d", "#ffbe73"],
};

/** Colours from the least to the greatest of the values that tell texts apart: a text is always like itself. */
export function sequential(matrix) {
  const apart = matrix.flatMap((row, i) => row.filter((_, j) => i !== j));
  const all = apart.length ? apart : matrix.flat();
  const low = Math.min(...all);
  return { low, high: Math.max(1, ...all), colours: SEQUENTIAL };
}

/** Colours of differences, alike on both sides of zero. */
export function diverging(matrix) {
  const most = Math.max(1e-6, ...matrix.flat().map(Math.abs));
  return { low: -most, high: most, colours: DIVERGING };
}

/** A figure: the matrix of `texts` with each other, its scale, and the pair under the pointer in words.
 *  `choose(row, column)` is called where a cell is clicked. */
export function heat(name, texts, matrix, scale, { signed = false, controls = [], choose } = {}) {
  const written = (value) => write(value, signed);
  const readout = make("p", { class: "readout", "aria-hidden": "true" }, "Point at a cell to read its pair.");
  const table = make(
    "table",
    { class: choose ? "heat asked" : "heat" },
    make("caption", { class: "unseen" }, name),
    head(texts),
    body(texts, matrix, written),
  );
  table.addEventListener("pointerover", ({ target }) => {
    if (target.tagName !== "TD" || !target.dataset.row) return;
    const [row, column] = [Number(target.dataset.row), Number(target.dataset.column)];
    const pair = [quote(clip(texts[row], 90)), make("span", { class: "and" }, "and"), quote(clip(texts[column], 90))];
    readout.replaceChildren(make("b", {}, written(matrix[row][column])), ...pair);
  });
  table.addEventListener("click", ({ target }) => {
    if (choose && target.dataset.row) choose(Number(target.dataset.row), Number(target.dataset.column));
  });
  const figure = make(
    "figure",
    { class: "matrix" },
    make("figcaption", {}, name),
    scroller(`${name}, table`, table),
    legend(scale, written, controls),
    readout,
  );
  const cells = [...table.querySelectorAll("td[data-row]")];
  const values = cells.map(({ dataset }) => matrix[dataset.row][dataset.column]);
  colour(figure, cells, values, scale);
  return figure;
}

/** Two decimals, with a true minus; what rounds to nothing has no sign. */
export function write(value, signed) {
  const digits = Math.abs(value).toFixed(2);
  if (Number(digits) === 0) return digits;
  return (value < 0 ? "−" : signed ? "+" : "") + digits;
}

function head(texts) {
  const cells = texts.map((text, i) => make("th", { scope: "col" }, String(i + 1), unseen(`: ${clip(text, 40)}`)));
  return make("thead", {}, make("tr", {}, make("td"), ...cells));
}

function body(texts, matrix, written) {
  const rows = matrix.map((values, i) => {
    const name = make(
      "th",
      { scope: "row" },
      make("span", { class: "number" }, String(i + 1)),
      " ",
      quote(clip(texts[i], 200)),
    );
    const cells = values.map((value, j) => make("td", { "data-row": i, "data-column": j }, written(value)));
    return make("tr", {}, name, ...cells);
  });
  return make("tbody", {}, ...rows);
}

export function legend(scale, written, controls = []) {
  const ramp = make("span", { class: "ramp", "aria-hidden": "true" });
  return make(
    "p",
    { class: "legend" },
    unseen("Colours run from "),
    written(scale.low),
    ramp,
    unseen(" to "),
    written(scale.high),
    ...controls,
  );
}

const repaint = new WeakMap(); // a figure that was replaced is let go
dark.addEventListener("change", () => {
  for (const ramp of document.querySelectorAll(".ramp")) repaint.get(ramp)?.();
});

/** Colour elements of a figure by their values, and its ramp by the scale; again where the scheme changes. */
export function colour(figure, elements, values, scale) {
  const paintAgain = () => paint(figure, elements, values, scale);
  repaint.set(figure.querySelector(".ramp"), paintAgain);
  paintAgain();
}

function paint(figure, elements, values, { low, high, colours }) {
  const stops = colours[dark.matches ? "dark" : "light"].map(channels);
  elements.forEach((element, i) => {
    const found = blend(stops, high > low ? (values[i] - low) / (high - low) : 1);
    element.style.backgroundColor = `rgb(${found})`;
    element.style.color = luminance(found) > 0.179 ? "#000" : "#fff"; // where black and white stand out alike
  });
  const gradient = stops.map((stop) => `rgb(${stop})`).join(", ");
  figure.querySelector(".ramp").style.backgroundImage = `linear-gradient(to right, ${gradient})`;
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** The colour at `level`, 0 to 1, between stops of equal distance. */
function blend(stops, level) {
  const place = Math.min(1, Math.max(0, level)) * (stops.length - 1);
  const at = Math.min(Math.floor(place), stops.length - 2);
  return stops[at].map((from, i) => Math.round(from + (stops[at + 1][i] - from) * (place - at)));
}

/** WCAG's relative luminance. */
function luminance(colour) {
  const [r, g, b] = colour.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
