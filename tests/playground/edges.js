// What tells a control from the page, and the focus: its contrast with the page, of which WCAG AA asks for 3.
() => {
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/[\d.]+/g).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = getComputedStyle(document.body).backgroundColor;
  const measured = (element, property) => {
    const [low, high] = [getComputedStyle(element)[property], paper].map(luminance).sort((a, b) => a - b);
    return { name: element.id || element.textContent, ratio: (high + 0.05) / (low + 0.05) };
  };
  const seen = (places) => [...document.querySelectorAll(places)].filter((element) => element.checkVisibility());
  const fields = seen("select, textarea, input:not([type=radio], [type=checkbox]), #slot");
  return [
    ...fields.map((element) => measured(element, "borderBottomColor")),
    ...seen(".primary").map((element) => measured(element, "backgroundColor")),
    measured(document.activeElement, "outlineColor"),
  ];
}
