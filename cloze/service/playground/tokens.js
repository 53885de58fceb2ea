// Tokens: the sequence that the model reads, and what is cut from it.

import { make, unseen } from "./dom.js";
import { plural } from "./texts.js";

const SHOWN = 40; // of the cut tokens, at either end of a longer run

const KINDS = {
  text: "text",
  template: "template",
  special: "special token",
  mask: "mask",
  cut: "cut",
};

export async function tokens(form, model, ask, info) {
  const direction = form.elements.direction.value;
  const [sequence] = await ask("tokenize", {
    inputs: form.elements["tokens-text"].value,
    truncation_direction: direction,
    model,
  });
  const kinds = sequence.map((token, i) => kind(token, i, sequence.length));
  const present = Object.keys(KINDS).filter((name) => kinds.includes(name));
  const said = summary(kinds, direction, info);
  const list = make("ol", { class: "sequence", "aria-label": "The tokens in their order" }, ...chips(sequence, kinds));
  const names = { ...KINDS, mask: info?.template.pooling === "mask" ? "mask, where the vector is read" : "mask" };
  return { view: [meter(kinds, info), make("p", { class: "count" }, said), legend(present, names), list], said };
}

/** A sequence begins and ends with a special token; one between them, of the template, is the mask. */
function kind({ special, template, cut }, i, length) {
  if (cut) return "cut";
  if (special && template) return i > 0 && i < length - 1 ? "mask" : "special";
  return template ? "template" : "text";
}

function summary(kinds, direction, info) {
  const count = (name) => kinds.filter((found) => found === name).length;
  const cut = count("cut");
  const used = kinds.length - cut;
  const limit = info ? ` of ${info.max_input_length.toLocaleString("en")}` : "";
  const parts = `${count("text").toLocaleString("en")} of the text, ${used - count("text")} of the template`;
  const side = direction === "left" ? "start (left)" : "end (right)";
  const lost = cut
    ? `${plural(cut, "token")} of the text ${cut === 1 ? "is" : "are"} cut at its ${side}.`
    : "Nothing is cut.";
  return `${used.toLocaleString("en")}${limit} tokens used: ${parts}. ${lost}`;
}

function meter(kinds, info) {
  const share = (names) =>
    kinds.filter((found) => names.includes(found)).length / (info?.max_input_length ?? kinds.length);
  const parts = { template: share(["template", "special", "mask"]), text: share(["text"]) };
  const bars = Object.entries(parts).map(([name, width]) => {
    const bar = make("span", { class: name });
    bar.style.width = `${100 * width}%`;
    return bar;
  });
  return make("div", { class: "meter", "aria-hidden": "true" }, ...bars);
}

function legend(present, names) {
  const items = present.map((name) =>
    make("li", {}, make("span", { class: `token ${name}`, "aria-hidden": "true" }, "abc"), names[name]),
  );
  return make("ul", { class: "kinds", "aria-label": "Kinds of token" }, ...items);
}

/** A chip for each token; of a long run of cut ones only both ends. */
function* chips(sequence, kinds) {
  const first = kinds.indexOf("cut");
  const last = kinds.lastIndexOf("cut");
  const [from, to] = first < 0 ? [0, 0] : [first + SHOWN, last - SHOWN];
  for (let i = 0; i < sequence.length; i++) {
    if (i === from && from < to) {
      yield make("li", { class: "more" }, `… ${(to - from).toLocaleString("en")} more are cut …`);
      i = to;
    }
    yield chip(sequence[i], kinds[i]);
  }
}

function chip({ id, text }, name) {
  const said = unseen(name === "text" ? "" : `, ${KINDS[name]}`);
  const word = make(name === "cut" ? "s" : "span", { class: "word", dir: "auto" }, text);
  return make("li", { class: `token ${name}` }, word, said, make("span", { class: "id" }, unseen(", id "), String(id)));
}
