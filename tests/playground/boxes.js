// Where each line of text that is seen is, and each field. Regions that scroll by themselves and the map are left out.
() => {
  const found = [];
  const add = (name, boxes) => {
    for (const { left, right, top, bottom } of boxes) found.push({ name, left, right, top, bottom });
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const element = node.parentElement;
    const hidden = element.closest("noscript, option, textarea, .unseen, .skip, .scroll, .plot");
    if (!node.textContent.trim() || hidden || !element.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    add(node.textContent.trim(), range.getClientRects());
  }
  for (const field of document.querySelectorAll("input, select, textarea")) {
    if (field.checkVisibility()) add(field.id || field.name, [field.getBoundingClientRect()]);
  }
  return found;
}
