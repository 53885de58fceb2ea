// Every piece of text that is seen: its contrast with what is behind it, and the least that WCAG AA asks for.
() => {
  const parse = (colour) => {
    const parts = colour.match(/[\d.]+/g).map(Number);
    return { rgb: parts.slice(0, 3), alpha: parts[3] ?? 1 };
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const { rgb, alpha } = parse(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return rgb;
      if (alpha > 0) throw new Error(`a half transparent background on ${at.outerHTML.slice(0, 80)}`);
    }
    throw new Error("nothing is behind the page");
  };
  const faded = (element) => {
    for (let at = element; at; at = at.parentElement) if (getComputedStyle(at).opacity !== "1") return true;
    return false;
  };

  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || element.closest("noscript, option, .unseen, .skip") || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const colour = parse(element instanceof SVGElement ? style.fill : style.color).rgb;
    const [low, high] = [luminance(colour), luminance(behind(element))].sort((a, b) => a - b);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const ratio = faded(element) ? 0 : (high + 0.05) / (low + 0.05);
    found.push({ text: text.slice(0, 40), ratio, least: large ? 3 : 4.5 });
  }
  return found;
}
