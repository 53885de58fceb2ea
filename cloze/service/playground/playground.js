// The page: the model and the key in its header, and a tool behind each tab.

import { ServiceError, call, hasKey, pathOf, setKey } from "./api.js";
import { compare } from "./compare.js";
import { byId, make } from "./dom.js";
import { labels } from "./labels.js";
import { map } from "./map.js";
import { search } from "./search.js";
import { Problem } from "./texts.js";
import { tokens } from "./tokens.js";

let info = null; // what /models/{model}/info says of the chosen model
let chosen = ""; // the model that it describes

/** A tab, its form and its result. What is shown belongs to the chosen model: `stale` says that it does not yet. */
class Tool {
  constructor(name, work) {
    this.tab = byId(`tab-${name}`);
    this.panel = byId(name);
    this.form = this.panel.querySelector("form");
    this.result = this.panel.querySelector(".result");
    this.work = work;
    this.stale = true;
    this.message = ""; // why there is no result
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.form.requestSubmit();
      }
    });
  }

  /** Ask, and show the answer; a run before this one that has not ended is given up. */
  async run() {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    this.stale = false;
    this.result.setAttribute("aria-busy", "true");
    this.say("", "");
    try {
      const { view, said } = await this.work(this.form, byId("model").value || undefined, ask(asking.signal), info);
      if (asking.signal.aborted) return;
      this.result.replaceChildren(...view);
      this.say("", said);
    } catch (error) {
      if (asking.signal.aborted) return;
      this.result.replaceChildren();
      complain(error, (message) => this.say(message, ""));
    } finally {
      if (!asking.signal.aborted) this.result.removeAttribute("aria-busy");
    }
  }

  /** Show an error, and tell screen readers what is new; only while this tab is shown. */
  say(message, said) {
    this.message = message;
    if (this !== shown) return;
    tell(message);
    byId("status").textContent = said;
  }
}

/** Asking by a tool: gives the data, and shows the time it took. */
function ask(signal) {
  return async (path, body) => {
    try {
      const { data, timing } = await call(path, body, signal);
      showTiming(timing);
      return data;
    } catch (error) {
      if (error.status === 401) askForKey();
      throw error;
    }
  };
}

const tools = [
  new Tool("compare", compare),
  new Tool("search", search),
  new Tool("map", map),
  new Tool("tokens", tokens),
  new Tool("labels", labels),
];
let shown = tools[0];
const byTool = (name) => tools.find(({ panel }) => panel.id === name);

// Messages

function tell(message) {
  byId("alert").replaceChildren(...(message ? [make("p", { class: "alert" }, message)] : []));
}

function complain(error, say = tell) {
  if (!(error instanceof ServiceError || error instanceof Problem)) {
    say("The page could not show the answer. This is a bug of the page.");
    throw error;
  }
  say(error.message);
  if (error.status === 401) askForKey();
}

// Tabs

function show(tool) {
  shown = tool;
  for (const { tab, panel } of tools) {
    const here = tab === tool.tab;
    tab.setAttribute("aria-selected", String(here));
    tab.tabIndex = here ? 0 : -1;
    panel.hidden = !here;
  }
  tell(tool.message);
  if (tool.stale) tool.run();
}

byId("main")
  .querySelector("[role=tablist]")
  .addEventListener("keydown", (event) => {
    const there = tools.filter(({ tab }) => !tab.hidden);
    const at = there.indexOf(shown);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: -1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const tool = there.at(next % there.length);
    tool.tab.focus();
    show(tool);
  });
for (const tool of tools) tool.tab.addEventListener("click", () => show(tool));

// Model

/** Ask what is served, choose the default, and run the tool that is shown. */
async function start() {
  tell();
  try {
    const [{ data: list }, { data: served }] = await Promise.all([call("v1/models"), call("info")]);
    const names = list.data.map(({ id }) => id);
    byId("model").replaceChildren(...names.map((name) => make("option", {}, name)));
    byId("model").disabled = false;
    byId("model").value = [chosen, served.served_model_name, names[0]].find((name) => names.includes(name));
    byId("key").hidden = true;
    byId("key-used").hidden = !hasKey();
    await choose();
  } catch (error) {
    complain(error);
  }
}

/** Take the chosen model: what is shown of another is stale. If it does not answer, keep the former one. */
async function choose() {
  const model = byId("model").value;
  let data;
  try {
    ({ data } = await call(`${pathOf(model)}/info`));
  } catch (error) {
    if (byId("model").value !== model) return;
    byId("model").value = chosen || model;
    throw error;
  }
  if (byId("model").value !== model) return; // another was chosen meanwhile
  [info, chosen] = [data, model];
  const others = [...byId("model").options].map(({ value }) => value).filter((name) => name !== model);
  byId("compare-with").replaceChildren(
    make("option", { value: "" }, "none"),
    ...others.map((name) => make("option", {}, name)),
  );
  byId("compare-with").parentElement.hidden = !others.length;
  describe(info);
  for (const tool of tools) tool.stale = true;
  byId("calibrated").parentElement.hidden = !info.calibration;
  byId("calibrated").checked &&= Boolean(info.calibration);
  byId("tab-labels").hidden = !Object.keys(info.heads).length;
  if (shown.tab.hidden) show(tools[0]);
  else await shown.run();
}

byId("model").addEventListener("change", () => choose().catch(complain));

/** The place of the text in the template. What is written there is the text of the tool Tokens, and the other way round. */
const slot = make("span", {
  class: "slot",
  id: "slot",
  role: "textbox",
  contenteditable: "plaintext-only",
  tabindex: "0",
  "aria-label": "Your text, in the template",
  "aria-placeholder": "your text",
  "aria-describedby": "template-note",
  enterkeyhint: "go",
  spellcheck: "false",
  dir: "auto",
});

slot.addEventListener("input", () => {
  if (!slot.textContent.trim()) slot.replaceChildren(); // a browser leaves a line break, which is not empty
  byId("tokens-text").value = slot.textContent;
  byTool("tokens").stale = true;
});
slot.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing) return;
  event.preventDefault();
  show(byTool("tokens"));
});
byId("tokens-text").addEventListener("input", () => (slot.textContent = byId("tokens-text").value));

function describe({ template, dimension, provider, model_dtype, max_input_length, version }) {
  const parts = template.text.split(/(\[X\]|\[MASK\])/);
  const slots = {
    "[X]": () => slot,
    "[MASK]": () => make("span", { class: "mask" }, "[MASK]"),
  };
  byId("template").replaceChildren(...parts.map((part) => slots[part]?.() ?? part));
  byId("template-note").hidden = false;
  const facts = [
    ["dimensions", dimension],
    ["read at", { mask: "[MASK]", cls: "[CLS]" }[template.pooling] ?? template.pooling],
    ["limit", `${max_input_length.toLocaleString("en")} tokens`],
    ["template", `${template.template_tokens} tokens`],
    ["runs on", `${provider}, ${model_dtype}`],
  ];
  byId("facts").replaceChildren(
    ...facts.map(([name, value]) => make("li", {}, `${name} `, make("b", {}, String(value)))),
  );
  byId("version").textContent = `Cloze ${version}.`;
}

// Key

function askForKey() {
  byId("key").hidden = false;
  byId("key-used").hidden = true;
  byId("key-value").focus();
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key-value").value, byId("key-keep").checked);
  byId("key-value").value = "";
  start().then(() => byId("key").hidden && shown.tab.focus());
});

byId("key-forget").addEventListener("click", () => {
  setKey("");
  tell("The key is forgotten.");
  askForKey();
});

// Latency

const STAGES = { tokenize: "tokenise", queue: "queue", inference: "inference", total: "total", trip: "round trip" };

function showTiming(timing) {
  const items = Object.entries(STAGES).filter(([stage]) => Number.isFinite(timing[stage]));
  const written = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en")} ms`;
  byId("timing").replaceChildren(
    ...items.map(([stage, name]) =>
      make("div", { class: stage }, make("dt", {}, name), make("dd", {}, written(timing[stage]))),
    ),
  );
  const bars = ["tokenize", "queue", "inference"].map((stage) => {
    const bar = make("span", { class: stage });
    bar.style.width = `${(100 * Math.min(timing[stage] ?? 0, timing.trip)) / timing.trip}%`;
    return bar;
  });
  byId("timing-bar").replaceChildren(...bars);
}

start();
