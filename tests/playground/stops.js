// How many stops the Tab key makes. They are in `window.stops`, in the order of the page.
// Of radio buttons and of the map's points one is a stop; the arrow keys go on from it.
() => {
  const places = "a[href], button, input, select, textarea, summary, [tabindex], [contenteditable]";
  window.stops = [...document.querySelectorAll(places)]
    .filter((element) => element.checkVisibility() && !element.disabled && element.tabIndex >= 0)
    .filter((element) => element.type !== "radio" || element.checked);
  return window.stops.length;
}
