// Texts as they are typed: lines, limits, and what is shown of a long one.

/** What the user has to change; its message says how. */
export class Problem extends Error {}

/** The lines that are not blank. Throws Problem where there are none, or more than `limit`. */
export function lines(area, limit, purpose) {
  const found = area.value.split("\n").filter((line) => line.trim());
  if (!found.length) throw new Problem("There is no text yet: put in at least one line.");
  if (found.length > limit) {
    const count = found.length.toLocaleString("en");
    const most = limit.toLocaleString("en");
    throw new Problem(`${count} lines are too many for ${purpose}; it takes ${most}. Remove ${found.length - limit}.`);
  }
  return found;
}

/** The first `length` signs of a text; none is torn in two. */
export function clip(text, length) {
  const signs = [...text.slice(0, 2 * length + 2)];
  return signs.length > length
    ? `${signs
        .slice(0, length - 1)
        .join("")
        .trimEnd()}…`
    : text;
}

export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Rows of cells as RFC 4180 has them. */
export function csv(rows) {
  const cell = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}
