// Map: the texts as points on two axes, with a table of the same numbers beside them.

import { decode } from "./api.js";
import { copyButton, make, makeSvg, quote, scroller } from "./dom.js";
import { project } from "./pca.js";
import { clip, csv, lines, plural } from "./texts.js";

const LIMIT = 2000;
const NAMED = 60; // up to so many points have their text beside them, where there is room
const MARGIN = 28;

export async function map(form, model, ask) {
  const texts = lines(form.elements["map-lines"], LIMIT, "the map");
  const rows = await ask("embed", { inputs: texts, encoding_format: "base64", model });
  const { points, shares } = project(rows.map(decode));
  const said = `${plural(texts.length, "text")} on two axes, which hold ${percent(shares[0] + shares[1])} of their variance.`;
  const table = () => [["number", "x", "y", "text"], ...texts.map((text, i) => [i + 1, ...points[i], text])];
  const list = make(
    "details",
    {},
    make("summary", {}, "The points as a table"),
    scroller("Coordinates", coordinates(texts, points)),
  );
  const note = make("p", { class: "note" }, said);
  return { view: [note, plot(texts, points, shares), list, copyButton("Copy as CSV", () => csv(table()))], said };
}

const percent = (share) => `${Math.round(100 * share)} %`;

function coordinates(texts, points) {
  const names = ["Number", "x", "y", "Text"].map((name) => make("th", { scope: "col" }, name));
  const rows = texts.map((text, i) => {
    const numbers = [i + 1, ...points[i].map((value) => value.toFixed(3).replace("-", "−"))];
    return make(
      "tr",
      {},
      ...numbers.map((value) => make("td", {}, String(value))),
      make("th", { scope: "row" }, quote(clip(text, 200))),
    );
  });
  return make("table", { class: "hits" }, make("thead", {}, make("tr", {}, ...names)), make("tbody", {}, ...rows));
}

/** The points, drawn again whenever the room changes. One is in the tab order; the arrow keys go on from it. */
function plot(texts, points, shares) {
  const tip = make("p", { class: "tip", "aria-hidden": "true", hidden: true, dir: "auto" });
  const frame = make("div", { class: "plot" }, tip);
  let active = 0;

  function draw() {
    const focused = frame.contains(document.activeElement);
    const width = frame.clientWidth;
    const height = Math.round(Math.min(560, Math.max(280, width * 0.72)));
    const place = scale(points, width, height);
    const svg = makeSvg("svg", {
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "listbox",
      tabindex: "-1", // Chromium makes a stop of an svg that listens for focus
      "aria-label": `Map of ${plural(texts.length, "text")}; the arrow keys go from point to point`,
    });
    const dots = texts.map((text, i) => dot(text, place[i], texts.length));
    svg.append(...axes(shares, width, height), ...labels(texts, place, width, height), ...dots);
    frame.querySelector("svg")?.remove();
    frame.prepend(svg);
    tip.hidden = true;
    listen(svg, dots, place);
    choose(dots, active);
    if (focused) dots[active].focus();
  }

  function choose(dots, i) {
    dots[active].setAttribute("tabindex", "-1");
    dots[active].setAttribute("aria-selected", "false");
    active = i;
    dots[active].setAttribute("tabindex", "0");
    dots[active].setAttribute("aria-selected", "true");
  }

  function listen(svg, dots, place) {
    const order = [0, 1].map((axis) => [...texts.keys()].sort((a, b) => place[a][axis] - place[b][axis] || a - b));
    const found = new Map(dots.map((element, i) => [element, i]));
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") tip.hidden = true;
      const next = neighbour(event.key, active, order);
      if (next === undefined) return;
      event.preventDefault();
      choose(dots, next);
      dots[next].focus();
    });
    const show = ({ target }) => found.has(target) && tell(found.get(target), place);
    svg.addEventListener("focusin", (event) => {
      show(event);
      if (found.has(event.target)) choose(dots, found.get(event.target));
    });
    svg.addEventListener("pointerover", show);
    for (const gone of ["focusout", "pointerout"]) svg.addEventListener(gone, () => (tip.hidden = true));
  }

  function tell(i, place) {
    const [x, y] = place[i];
    tip.textContent = clip(texts[i], 240);
    tip.hidden = false;
    const left = Math.min(Math.max(x - tip.offsetWidth / 2, 0), frame.clientWidth - tip.offsetWidth);
    const above = y - tip.offsetHeight - 12;
    tip.style.left = `${left}px`;
    tip.style.top = `${above < 0 ? y + 14 : above}px`;
  }

  let width = 0;
  new ResizeObserver(() => {
    if (frame.clientWidth && frame.clientWidth !== width) {
      width = frame.clientWidth;
      draw();
    }
  }).observe(frame);
  return frame;
}

/** Left and right go by x, up and down by y, so that every point can be reached. */
function neighbour(key, from, [across, down]) {
  const steps = { ArrowLeft: [across, -1], ArrowRight: [across, 1], ArrowUp: [down, -1], ArrowDown: [down, 1] };
  if (key === "Home") return across[0];
  if (key === "End") return across.at(-1);
  if (!(key in steps)) return undefined;
  const [order, step] = steps[key];
  return order[Math.min(order.length - 1, Math.max(0, order.indexOf(from) + step))];
}

/** Coordinates to pixels: one measure for both axes, so that distances on the screen are those of the plane. */
function scale(points, width, height) {
  const range = (axis) => {
    const values = points.map((point) => point[axis]);
    return [Math.min(...values), Math.max(...values)];
  };
  const [[left, right], [low, high]] = [range(0), range(1)];
  const room = [width - 2 * MARGIN, height - 2 * MARGIN];
  const unit = Math.min(room[0] / (right - left || 1e-9), room[1] / (high - low || 1e-9));
  const size = right - left < 1e-9 && high - low < 1e-9 ? 0 : unit;
  return points.map(([x, y]) => [
    width / 2 + (x - (left + right) / 2) * size,
    height / 2 - (y - (low + high) / 2) * size,
  ]);
}

function dot(text, [x, y], count) {
  const many = count > NAMED;
  return makeSvg("circle", {
    class: many ? "dot many" : "dot",
    cx: x.toFixed(1),
    cy: y.toFixed(1),
    r: many ? 4 : 6,
    role: "option",
    tabindex: "-1",
    "aria-selected": "false",
    "aria-label": clip(text, 240),
  });
}

function axes(shares, width, height) {
  const names = [`first axis, ${percent(shares[0])} of the variance`, `second axis, ${percent(shares[1])}`];
  return [
    makeSvg("line", { class: "axis", x1: 0, x2: width, y1: height - 1, y2: height - 1 }),
    makeSvg("line", { class: "axis", x1: 1, x2: 1, y1: 0, y2: height }),
    makeSvg(
      "text",
      { class: "axis-name", x: width - 6, y: height - 8, "text-anchor": "end", "aria-hidden": "true" },
      names[0],
    ),
    makeSvg(
      "text",
      { class: "axis-name", transform: "translate(14 6) rotate(-90)", "text-anchor": "end", "aria-hidden": "true" },
      names[1],
    ),
  ];
}

/** Texts beside their points: right, left, above or below, wherever nothing else is; else none. */
function labels(texts, place, width, height) {
  if (texts.length > NAMED) return [];
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const taken = place.map(([x, y]) => [x - 7, y - 7, x + 7, y + 7]);
  taken.push([width - 230, height - 22, width, height], [0, 0, 22, 130]);
  return texts.flatMap((text, i) => {
    const short = clip(text, 30);
    const long = pen.measureText(short).width;
    const [x, y] = place[i];
    const starts = [
      [x + 11, y + 4],
      [x - 11 - long, y + 4],
      [x - long / 2, y - 12],
      [x - long / 2, y + 20],
    ];
    const free = starts
      .map(([left, base]) => [left, base - 11, left + long, base + 3])
      .find((box) => fits(box, taken, width, height));
    if (!free) return [];
    taken.push(free);
    return [
      makeSvg(
        "text",
        { class: "dot-name", x: free[0].toFixed(1), y: (free[3] - 3).toFixed(1), "aria-hidden": "true" },
        short,
      ),
    ];
  });
}

function fits([left, top, right, bottom], taken, width, height) {
  if (left < 2 || top < 2 || right > width - 2 || bottom > height - 2) return false;
  return taken.every(([l, t, r, b]) => right < l || left > r || bottom < t || top > b);
}
