// Elements made in code. A string becomes a text node, so a text with markup in it is shown as it was typed.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Words that only a screen reader says. */
export const unseen = (words) => make("span", { class: "unseen" }, words);

/** A text of the user's, in its own direction. */
export const quote = (text, attributes = {}) => make("span", { dir: "auto", ...attributes }, text);

/** A region that scrolls by itself, and that the keyboard can reach to do so. */
export function scroller(label, ...children) {
  return make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": label }, ...children);
}

/** A button that copies what `content()` gives, and says so. */
export function copyButton(name, content) {
  const button = make("button", { type: "button", class: "plain" }, name);
  button.addEventListener("click", async () => {
    const done = await copy(content());
    byId("status").textContent = button.textContent = done ? "Copied" : "The browser does not let this page copy";
    button.addEventListener("blur", () => (button.textContent = name), { once: true });
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard)
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  const area = make("textarea", { class: "unseen" }); // over plain http, but for localhost, there is no clipboard
  const focused = document.activeElement;
  document.body.append(area);
  area.value = text;
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}
