// A click on a heading sorts its table; without scripts the tables are as readable.
"use strict";
const number = (text) => {
  const found = text.replace(/,/g, "").replace("\u2212", "-").match(/^[+-]?\d+(\.\d+)?/);
  return found ? Number(found[0]) : null;
};
const compare = (one, other, numeric) => {
  // A name such as 16b-bf16 begins with digits as well.
  const [a, b] = numeric ? [number(one), number(other)] : [null, null];
  if (a !== null && b !== null) return a - b;
  return one.localeCompare(other, "en", { numeric: true });
};
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const text = (row) => row.cells[column].textContent.trim();
      const isKnown = (row) => text(row) !== "-";
      const rows = [...body.rows];
      const numeric = heading.classList.contains("r");
      const known = rows.filter(isKnown).sort((a, b) => compare(text(a), text(b), numeric));
      // What is not known stays at the end either way.
      body.append(...(descending ? known.reverse() : known), ...rows.filter((row) => !isKnown(row)));
    });
  });
}
